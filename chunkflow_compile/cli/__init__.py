"""The command line, with one file per command.  A command takes arguments, prints tables or JSON, and returns an exit code.

Start with main.py (exit codes), parsers.py (all arguments, without torch), arguments.py (arguments that several commands
share), output.py (stdout, stderr, --json), planning_arguments.py (from the arguments of most commands to a model and a
machine) and planned_model.py (the model that they plan).
"""
