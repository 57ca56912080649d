//! Routing policies over worker views and active-sequence accounting.
