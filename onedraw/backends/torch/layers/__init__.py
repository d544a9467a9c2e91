"""The layers of a stack: functions of their arguments."""
