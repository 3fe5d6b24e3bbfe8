"""Training steps of Decision Transformers, ours and others', each in a process of its own that steps on command.

The programs of others run in virtual environments of their own, which have nothing of this project: what these files
import from one another is found beside them.
"""
