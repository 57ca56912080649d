//! The frontend's modules as its users see them.

mod answers;
mod direct;
mod huggingface;
mod layers;
mod requests;
mod structured;
