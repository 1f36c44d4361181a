"""Collective algorithms: functions of a communicator and a buffer."""
