"""Wire protocols: schemas of bodies, their translation to chats, and answers in their shapes, whole or as events.

The server's routes use them, and so does a fleet's front. Knows no sockets and no model.
"""
