# SPDX-License-Identifier: Apache-2.0
"""Quality of policies, measured on the serving path: tasks, runner, report."""
