//! Bodies of HTTP requests: either rejected with a status and a reason, or a request.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run http_body`; the corpus is kept under
//! `fuzz/corpus/http_body`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slipstream_frontend::openai::{self, ApiError};

fuzz_target!(|bytes: &[u8]| {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    check(openai::parse_completion(bytes));
    check(openai::parse_chat(bytes));
    check(openai::parse_turn(bytes));
    check(openai::parse_embeddings(bytes));
    check(openai::parse_tokenize(bytes));
    check(openai::parse_detokenize(bytes));
    check(openai::parse_messages(bytes, first & 1 == 1));
    check(openai::parse_responses(bytes, None));
    // A stored conversation, and what follows it.
    let (before, after) = rest.split_at(rest.len().min(usize::from(first)));
    check(openai::parse_responses(after, Some(before)));
    let _ = openai::previous_response_id(bytes);
});

fn check<T>(parsed: Result<T, ApiError>) {
    if let Err(error) = parsed {
        assert!((400..500).contains(&error.status), "{error:?}");
        assert!(!error.message.is_empty(), "{error:?}");
    }
}
