//! Request, response and event plane: frames, rings, stream tables, discovery.
