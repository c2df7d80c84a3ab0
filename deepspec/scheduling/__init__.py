"""How much of a draft to verify: confidence, its calibration, schedules, the cost curve, a simulator, sweeps."""
