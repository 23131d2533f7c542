"""The command line, one file per command: arguments come in; tables, JSON and an exit code go out.

Read main.py (exit codes), parsers.py (all arguments, without torch; arguments.py has those that commands share), output.py
(stdout, stderr, --json) and target.py (the model and machine that most commands take) first, then any command.
"""
