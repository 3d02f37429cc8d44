"""The SGLang plugin: runs in SGLang's processes, attends to the resident set."""
