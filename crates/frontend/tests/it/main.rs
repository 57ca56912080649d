//! The frontend's modules as its users see them.

mod huggingface;
