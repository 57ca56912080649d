//! Files of models as their publishers write them.

mod index;
mod keys;
mod models;
mod strangers;
