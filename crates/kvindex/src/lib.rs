//! Cached blocks by owner, fed by deltas; prefix look-up without locks.
