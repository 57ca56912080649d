//! The two requests of disaggregated prefill: vLLM's protocol. No I/O.
//!
//! The prefill engine gets the client's request for one token, with `kv_transfer_params` that ask it to keep the
//! prompt's keys and values. The `kv_transfer_params` of its answer go to the decode engine with the client's
//! body, as they are: only the two engines' KV connectors know their fields.
//!
//! Source: `request_finished` of vLLM's connectors (`vllm/distributed/kv_transfer/kv_connector/v1`), and vLLM's
//! proxies for them (`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`).

use std::fmt;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use slipstream_base::Role;

/// Maximum bytes of a prefill engine's answer.
pub(super) const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Asks the prefill engine to keep what it computes for another engine.
const ASK: &str = "\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
                   \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\
                   \"remote_port\":null}";

/// Fields of the client's body that the prefill engine does not get: those set anew, those that contradict one
/// token without a stream, and those that only lengthen its answer.
const OMITTED: &[&str] = &[
    "kv_transfer_params",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "min_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
];

/// A request to an engine, as a part of a client's request.
#[derive(Clone, Debug, Default)]
pub(super) struct StageRequest {
    /// The part.
    pub(super) role: Role,
    /// [`Role::Prefill`]: the body. [`Role::Decode`]: fields that precede those of the client's body.
    pub(super) bytes: Bytes,
}

/// The body for the prefill engine; `None` if `body` is not a JSON object.
pub(super) fn prefill_body(body: &[u8]) -> Option<Vec<u8>> {
    let Fields(fields) = serde_json::from_slice(body).ok()?;
    let mut out = Vec::with_capacity(body.len() + ASK.len() + 64);
    out.push(b'{');
    let chat_limit = fields
        .iter()
        .any(|(name, _)| name == "max_completion_tokens");
    for (name, value) in fields {
        if OMITTED.contains(&&*name) {
            continue;
        }
        serde_json::to_writer(&mut out, &*name).ok()?;
        out.push(b':');
        out.extend_from_slice(value.get().as_bytes());
        out.push(b',');
    }
    if chat_limit {
        out.extend_from_slice(b"\"max_completion_tokens\":1,");
    }
    out.extend_from_slice(b"\"max_tokens\":1,\"stream\":false,");
    out.extend_from_slice(ASK.as_bytes());
    out.push(b'}');
    Some(out)
}

/// The bytes before the fields of the client's body for the decode engine, after the prefill engine's `answer`.
/// `Ok(None)`: the engine has kept nothing.
///
/// # Errors
/// The answer is not a JSON object, as a clause.
pub(super) fn decode_fields(answer: &[u8]) -> Result<Option<Bytes>, String> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let answer: Answer<'_> = serde_json::from_slice(answer)
        .map_err(|error| format!("its answer cannot be read: {error}"))?;
    let params = answer.kv_transfer_params.map(RawValue::get);
    // Anything but an object is no set of parameters.
    let params = params.filter(|params| params.starts_with('{') && *params != "{}");
    Ok(params.map(|params| format!("\"kv_transfer_params\":{params},").into()))
}

/// Header lines for the prefill engine, whose answer is read here: without those that ask for a compressed one.
pub(super) fn prefill_headers(lines: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(lines.len());
    for line in lines.split_inclusive(|&b| b == b'\n') {
        let name = line.split(|&b| b == b':').next().unwrap_or_default();
        if !name.eq_ignore_ascii_case(b"accept-encoding") {
            out.extend_from_slice(line);
        }
    }
    out.into()
}

/// The fields of an object, in order, with their values as they are written.
struct Fields<'a>(Vec<(std::borrow::Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(name) = map.next_key()? {
                    fields.push((name, map.next_value()?));
                }
                Ok(Fields(fields))
            }
        }
        from.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefill_engine_gets_the_prompt_and_one_token() {
        let body = br#"{"model":"m", "prompt":"a\u0062\"c","max_tokens":50,"min_tokens":9,"stream":true,
            "stream_options":{"include_usage":true},"max_completion_tokens":50,"x":{"stream":1.0e+2},
            "odd \"name\"":[null],"logprobs":3,"kv_transfer_params":null}"#;
        let made = prefill_body(body).unwrap();
        let text = std::str::from_utf8(&made).unwrap();
        // Values as they were written.
        assert!(
            text.starts_with(
                r#"{"model":"m","prompt":"a\u0062\"c","x":{"stream":1.0e+2},"odd \"name\"":[null],"#
            ),
            "{text}"
        );
        let made: serde_json::Value = serde_json::from_slice(&made).unwrap();
        for (field, value) in [
            ("max_tokens", serde_json::json!(1)),
            ("max_completion_tokens", serde_json::json!(1)),
            ("stream", serde_json::json!(false)),
            (
                "kv_transfer_params",
                serde_json::json!({
                    "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                    "remote_block_ids": null, "remote_host": null, "remote_port": null,
                }),
            ),
        ] {
            assert_eq!(made[field], value, "{field}");
        }
        for field in ["min_tokens", "stream_options", "logprobs"] {
            assert!(made.get(field).is_none(), "{field}");
        }
        let plain = prefill_body(br#"{"prompt":[1]}"#).unwrap();
        let plain: serde_json::Value = serde_json::from_slice(&plain).unwrap();
        assert!(plain.get("max_completion_tokens").is_none());
        for bad in ["", "[]", "7", "{", "{\"a\":1} x", "{\"a\" 1}"] {
            assert!(prefill_body(bad.as_bytes()).is_none(), "{bad}");
        }
    }

    #[test]
    fn parameters_are_passed_on_as_they_are_written() {
        let params = r#"{"remote_block_ids":[[1,2],[]],"remote_engine_id":"\u00e9","x":{"y":1e3},"n":12345678901234567890123}"#;
        let answer = format!(
            r#"{{"id":"a","choices":[{{"kv_transfer_params":7}}],"kv_transfer_params": {params} }}"#
        );
        let fields = decode_fields(answer.as_bytes()).unwrap().unwrap();
        assert_eq!(fields, format!("\"kv_transfer_params\":{params},"));
        for none in [
            r#"{"id":"a"}"#,
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{}}"#,
            r#"{"kv_transfer_params":[1]}"#,
        ] {
            assert_eq!(decode_fields(none.as_bytes()), Ok(None), "{none}");
        }
        for bad in ["", "data: {}\n\n", "[", "\u{1f}\u{8b}"] {
            assert!(decode_fields(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_prefill_answer_is_not_compressed() {
        let lines = b"x-a: 1\r\nAccept-Encoding: gzip\r\nx-b: accept-encoding: br\r\n";
        assert_eq!(
            prefill_headers(lines),
            &b"x-a: 1\r\nx-b: accept-encoding: br\r\n"[..]
        );
    }
}
