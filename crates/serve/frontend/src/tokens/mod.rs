//! Answers in tokens: requests of modelled workers.

pub(crate) mod answers;
pub(crate) mod direct;
pub(crate) mod dispatching;
pub(crate) mod duplex;
pub(crate) mod embeddings;
pub(crate) mod generate;
pub(crate) mod hosting;
pub(crate) mod kv_network;
pub(crate) mod messages;
pub mod remote;
pub(crate) mod replies;
pub(crate) mod reply;
pub(crate) mod response_store;
pub(crate) mod responses;
pub mod roster;
pub(crate) mod script;
pub(crate) mod tokenize;
pub(crate) mod vocab;
pub(crate) mod workers;
