"""A trained model as a policy: reset, act, observe."""
