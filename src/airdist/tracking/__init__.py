"""The MLflow run of a launch: ``run`` in the caller, ``rank`` in the ranks, ``uri`` for both.

Nothing is imported here, because a rank needs only its part and should start quickly.
"""
