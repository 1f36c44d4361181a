"""Model of a training for the planner: units, their operations, and their split over pipeline ranks.

Start reading with `description.ModelDescription` and `transformer.describe`, which creates one.
"""
