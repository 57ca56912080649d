//! The frontend's modules as its users see them.

mod answers;
mod direct;
mod huggingface;
mod requests;
mod structured;
