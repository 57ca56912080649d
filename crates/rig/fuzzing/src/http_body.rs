//! Bodies of HTTP requests: either rejected with a status and a reason, or a request.

use slipstream_frontend::openai::{self, ApiError};

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    expect_reason(openai::parse_completion(bytes));
    expect_reason(openai::parse_chat(bytes));
    expect_reason(openai::parse_turn(bytes));
    expect_reason(openai::parse_embeddings(bytes));
    expect_reason(openai::parse_tokenize(bytes));
    expect_reason(openai::parse_detokenize(bytes));
    expect_reason(openai::parse_messages(bytes, first & 1 == 1));
    expect_reason(openai::parse_responses(bytes, None));
    // A stored conversation, and what follows it.
    let (before, after) = rest.split_at(rest.len().min(usize::from(first)));
    expect_reason(openai::parse_responses(after, Some(before)));
    let _ = openai::previous_response_id(bytes);
}

fn expect_reason<T>(parsed: Result<T, ApiError>) {
    if let Err(error) = parsed {
        assert!((400..500).contains(&error.status), "{error:?}");
        assert!(!error.message.is_empty(), "{error:?}");
    }
}
