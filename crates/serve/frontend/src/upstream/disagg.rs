//! The two requests of disaggregated prefill, by protocol. No I/O.
//!
//! | protocol | the prefill engine gets | the decode engine gets |
//! | --- | --- | --- |
//! | [`KvProtocol::Params`] | the client's request for one token, with `kv_transfer_params` that ask it to keep the prompt's keys and values | afterwards, the client's body with the `kv_transfer_params` of that answer as they are: only the engines' KV connectors know their fields |
//! | [`KvProtocol::Mooncake`] | the same, with a `transfer_id` | at once, the client's body with that id and the address of the prefill engine's bootstrap server |
//! | [`KvProtocol::Sglang`] | the client's body with a `bootstrap_room` and the address of its bootstrap server | at once, the same |
//!
//! Sources: `request_finished` of vLLM's connectors (`vllm/distributed/kv_transfer/kv_connector/v1`; for Mooncake
//! `get_num_new_matched_tokens` and `MooncakeBootstrapServer.query`), vLLM's proxies for them
//! (`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`, `mooncake_connector_proxy.py`), and SGLang's
//! (`sglang/srt/disaggregation/mini_lb.py`).

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use slipstream_base::Role;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::KvProtocol;

/// Maximum bytes of a prefill engine's answer.
pub(super) const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Asks the prefill engine to keep what it computes for another engine.
const ASK: &str = "\"do_remote_decode\":true,\"do_remote_prefill\":false,\
                   \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\
                   \"remote_port\":null";

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
    pub(super) change: Change,
}

/// The body of a request to an engine, compared with the client's.
#[derive(Clone, Debug, Default)]
pub(super) enum Change {
    /// Byte for byte.
    #[default]
    None,
    /// Another one.
    Body(Bytes),
    /// These fields, each with a comma after it, precede the client's.
    Before(Bytes),
    /// These fields, each with a comma before it, follow the client's: they win over fields of the same name.
    After(Bytes),
}

/// How two engines that are asked at once find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// [`KvProtocol::Mooncake`]
    Mooncake {
        /// Fields of `kv_transfer_params` for the prefill engine, and for the decode engine.
        fields: [String; 2],
        /// The data-parallel rank of the prefill engine, if it has several.
        rank: Option<usize>,
    },
    /// [`KvProtocol::Sglang`]: fields for both engines.
    Sglang(String),
}

impl Meeting {
    /// A meeting at the bootstrap server of a prefill engine at `host`, named by two random numbers. `ids` are those
    /// of the prefill engine's ranks. `None`: the protocol asks one engine after the other, or there are no `ids`.
    pub(super) fn new(
        (protocol, port): (KvProtocol, u16),
        host: &str,
        ids: &[String],
        draws: [u64; 2],
    ) -> Option<Meeting> {
        let host = bracketed(host);
        match protocol {
            KvProtocol::Auto | KvProtocol::Params => None,
            KvProtocol::Sglang => {
                // SGLang numbers the rooms of several prompts from there, in 63 bits.
                let room = draws[0] >> 2;
                Some(Meeting::Sglang(format!(
                    ",\"bootstrap_host\":\"{host}\",\"bootstrap_port\":{port},\"bootstrap_room\":{room}"
                )))
            }
            KvProtocol::Mooncake => {
                let rank = usize::try_from(draws[0] % ids.len().max(1) as u64).ok()?;
                let id = serde_json::to_string(ids.get(rank)?).ok()?;
                let transfer = format!("\"transfer_id\":\"{:016x}{:016x}\"", draws[0], draws[1]);
                Some(Meeting::Mooncake {
                    fields: [
                        format!("\"do_remote_decode\":true,\"do_remote_prefill\":false,{transfer}"),
                        format!(
                            "\"kv_transfer_params\":{{\"do_remote_decode\":false,\"do_remote_prefill\":true,\
                             \"remote_engine_id\":{id},\"remote_bootstrap_addr\":\"http://{host}:{port}\",{transfer}}},"
                        ),
                    ],
                    rank: (ids.len() > 1).then_some(rank),
                })
            }
        }
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

/// Value of `Host` for a bootstrap server.
pub(super) fn bootstrap_authority(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed(host))
}

/// Ids of data-parallel ranks, in their order, in the answer of a bootstrap server (`{"0": {"engine_id": …}, …}`).
///
/// # Errors
/// There is none, as a clause.
pub(super) fn bootstrap_ids(answer: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Rank {
        engine_id: String,
    }
    let ranks: BTreeMap<u32, Rank> = serde_json::from_slice(answer)
        .map_err(|error| format!("the answer of /query cannot be read: {error}"))?;
    if ranks.is_empty() {
        return Err("no rank of the engine is registered yet".into());
    }
    if ranks
        .keys()
        .ne(&(0..to_u32(ranks.len())).collect::<Vec<_>>())
    {
        return Err("ranks of the engine are not registered yet".into());
    }
    Ok(ranks.into_values().map(|rank| rank.engine_id).collect())
}

/// The body for a prefill engine with a KV connector of vLLM; `None` if `body` is not a JSON object. `params`: fields of
/// `kv_transfer_params`; `None`: those of [`KvProtocol::Params`].
pub(super) fn prefill_body(body: &[u8], params: Option<&str>) -> Option<Vec<u8>> {
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
    out.extend_from_slice(b"\"max_tokens\":1,\"stream\":false,\"kv_transfer_params\":{");
    out.extend_from_slice(params.unwrap_or(ASK).as_bytes());
    out.extend_from_slice(b"}}");
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
        let made = prefill_body(body, None).unwrap();
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
        let plain = prefill_body(br#"{"prompt":[1]}"#, None).unwrap();
        let plain: serde_json::Value = serde_json::from_slice(&plain).unwrap();
        assert!(plain.get("max_completion_tokens").is_none());
        for bad in ["", "[]", "7", "{", "{\"a\":1} x", "{\"a\" 1}"] {
            assert!(prefill_body(bad.as_bytes(), None).is_none(), "{bad}");
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
    fn ids(of: &[&str]) -> Vec<String> {
        of.iter().map(|&id| id.into()).collect()
    }

    #[test]
    fn engines_that_are_asked_at_once_get_one_name_for_the_transfer() {
        let draws = [0xffff_ffff_ffff_fff1, 7];
        let meeting =
            |protocol, host, of: &[&str]| Meeting::new((protocol, 9000), host, &ids(of), draws);
        let Some(Meeting::Sglang(fields)) = meeting(KvProtocol::Sglang, "::1", &[]) else {
            panic!("no room");
        };
        let fields: serde_json::Value =
            serde_json::from_str(&format!("{{\"a\":1{fields}}}")).unwrap();
        let room = 0x3fff_ffff_ffff_fffc_u64; // room + 128 prompts has 63 bits
        let expected = serde_json::json!(
            {"a": 1, "bootstrap_host": "[::1]", "bootstrap_port": 9000, "bootstrap_room": room});
        assert_eq!(fields, expected);

        let Some(Meeting::Mooncake { fields, rank }) =
            meeting(KvProtocol::Mooncake, "gpu1", &["a", "b\"", "c"])
        else {
            panic!("no transfer id");
        };
        assert_eq!(rank, Some(1));
        let body = prefill_body(br#"{"prompt":"x","max_tokens":5}"#, Some(&fields[0])).unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let id = "fffffffffffffff10000000000000007";
        assert_eq!(
            body["kv_transfer_params"],
            serde_json::json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id})
        );
        let decode: serde_json::Value =
            serde_json::from_str(&format!("{{{}\"x\":1}}", fields[1])).unwrap();
        assert_eq!(
            decode["kv_transfer_params"],
            serde_json::json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
                "remote_engine_id": "b\"", "remote_bootstrap_addr": "http://gpu1:9000"})
        );
        let alone = meeting(KvProtocol::Mooncake, "gpu1", &["a"]);
        assert!(matches!(alone, Some(Meeting::Mooncake { rank: None, .. })));
        // Its bootstrap server has not answered yet.
        assert_eq!(meeting(KvProtocol::Mooncake, "gpu1", &[]), None);
        assert_eq!(meeting(KvProtocol::Params, "gpu1", &["a"]), None);
    }

    #[test]
    fn ranks_of_a_bootstrap_server_are_read_in_their_order() {
        let answer = r#"{"1":{"engine_id":"b","worker_addr":{"0":{"0":"tcp://h:1"}}},"0":{"engine_id":"a"}}"#;
        assert_eq!(bootstrap_ids(answer.as_bytes()).unwrap(), ids(&["a", "b"]));
        for bad in [
            "",
            "[]",
            "{}",
            "{\"x\":{}}",
            r#"{"1":{"engine_id":"b"}}"#,
            r#"{"0":{}}"#,
        ] {
            assert!(bootstrap_ids(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
