//! Files of models as their publishers write them.

mod index;
mod models;
mod strangers;
