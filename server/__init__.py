"""Front door: CLI, settings, launching and status. The only code that starts processes."""
