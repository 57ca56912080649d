//! OpenAI HTTP and SSE, tokenizer, chat templates, admission.
//!
//! [`openai`] is the API as bytes in and bytes out, [`text`] turns text into tokens and back.
//! Neither does I/O, but for reading the files of a tokenizer.
#![forbid(unsafe_code)]

pub mod openai;
pub mod text;
