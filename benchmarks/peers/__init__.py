"""Training steps of Decision Transformers, ours and others', each in its own process that makes one step per command.

The other libraries run in their own virtual environments, where this project is not installed. These files therefore
import one another by file name, from their own folder.
"""
