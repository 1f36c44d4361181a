"""Model of a training for the planner: its units, their operations, and their split over pipeline ranks.

Imports `layout` and `estimate` of the planner, and models and strategies below it; `memory` and `time` build on it.
Begin with `description.ModelDescription` (units in numbers) and `transformer.describe`, which makes one.
"""
