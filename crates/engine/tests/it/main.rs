//! The engine from outside: answers worked out by hand, and runs against a plain model.

mod known_answers;
mod rig;
