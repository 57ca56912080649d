//! Files of models as their publishers write them.

mod models;
mod strangers;
