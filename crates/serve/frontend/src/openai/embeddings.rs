//! Requests for embeddings, and the modelled vectors.
//!
//! Source: OpenAI's API reference, "Create embeddings"; vLLM, `vllm/entrypoints/pooling/embed/protocol.py`.

use slipstream_base::mix;
use slipstream_base::width::nearest_f32;
use slipstream_structured::Tree;

use super::members::{missing, read_members, whole, wrong_type};
use super::value::Json;
use super::{ApiError, Head};
use crate::json::{self, Out};

/// Numbers of a vector if the request does not say how many.
pub const DIMENSIONS: u32 = 1024;
/// Numbers of a vector at most.
pub const DIMENSIONS_MAX: u32 = 8192;

/// How the numbers of a vector are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// An array of numbers.
    Float,
    /// 32-bit floats, the low byte first, in Base64 (RFC 4648, section 4).
    Base64,
}

/// A request that became completions of one token, so that the engines compute its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsRequest {
    /// Body of `POST /v1/completions`.
    pub completion: Vec<u8>,
    /// Numbers per vector.
    pub dimensions: u32,
    /// How they are written.
    pub encoding: Encoding,
}

/// Parses the body of `POST /v1/embeddings`.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault.
pub fn parse_embeddings(body: &[u8]) -> Result<EmbeddingsRequest, ApiError> {
    let mut completion: Vec<(String, Tree)> = Vec::new();
    let mut dimensions = DIMENSIONS;
    let mut encoding = Encoding::Float;
    let mut has_input = false;
    read_members(
        body,
        |_| true,
        |name, value| {
            if value == Json::Null {
                return Ok(());
            }
            let mut put = |name: &str, value: Tree| {
                completion.retain(|(known, _)| known != name);
                completion.push((name.into(), value));
            };
            match name {
                "input" => {
                    has_input = true;
                    put("prompt", value.into_tree());
                }
                "model" | "user" | "request_id" | "priority" | "cache_salt"
                | "add_special_tokens" => put(name, value.into_tree()),
                "dimensions" => dimensions = whole(name, &value, 1, DIMENSIONS_MAX)?,
                "encoding_format" => {
                    encoding = match &value {
                        Json::Text(text) if text == "float" => Encoding::Float,
                        Json::Text(text) if text == "base64" => Encoding::Base64,
                        Json::Text(_) => {
                            return Err(ApiError::unsupported(
                                name,
                                format!("`{name}` must be `float` or `base64`"),
                            ));
                        }
                        other => return Err(wrong_type(name, "a string", other)),
                    };
                }
                "messages" => {
                    return Err(ApiError::unsupported(
                        name,
                        format!("`{name}` is not supported: send the text as `input`"),
                    ));
                }
                "truncate_prompt_tokens" => {
                    return Err(ApiError::unsupported(
                        name,
                        format!("`{name}` is not supported: shorten the input before it is sent"),
                    ));
                }
                _ => {}
            }
            Ok(())
        },
    )?;
    if !has_input {
        return Err(missing("input"));
    }
    completion.push(("max_tokens".into(), Tree::Number(1.into())));
    let completion = serde_json::to_vec(&Tree::Object(completion)).expect("a tree is JSON");
    Ok(EmbeddingsRequest {
        completion,
        dimensions,
        encoding,
    })
}

/// An error of the completion, with the fields' names as this API has them.
pub fn embedding_field_names(mut error: ApiError) -> ApiError {
    if let Some(param) = &mut error.param
        && let Some(rest) = param.strip_prefix("prompt")
    {
        *param = format!("input{rest}");
        error.message = error.message.replace("`prompt", "`input");
    }
    error
}

/// The modelled vector of an input with this `seed`: `dimensions` numbers of Euclidean length 1. Vectors of
/// different inputs point in independent directions: their distances have no meaning.
pub fn unit_vector(seed: u64, dimensions: u32) -> Vec<f32> {
    let number = |at: u32| {
        // The upper 53 bits as a number from [-1, 1).
        let bits = mix::draw(seed, u64::from(at)) >> 11;
        bits as f64 / (1u64 << 52) as f64 - 1.0
    };
    let numbers: Vec<f64> = (0..dimensions).map(number).collect();
    let square: f64 = numbers.iter().map(|x| x * x).sum();
    let length = if square > 0.0 { square.sqrt() } else { 1.0 };
    numbers.iter().map(|x| nearest_f32(x / length)).collect()
}

/// Body of the answer: a vector per seed.
pub fn embeddings_json(
    head: &Head<'_>,
    seeds: &[u64],
    request: &EmbeddingsRequest,
    prompt_tokens: u64,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(256 + seeds.len() * request.dimensions as usize * 12);
    out.put(b"{\"id\":");
    json::string(&mut out, head.id);
    out.put(b",\"object\":\"list\",\"created\":");
    json::integer(&mut out, head.created);
    out.put(b",\"model\":");
    json::string(&mut out, head.model);
    out.put(b",\"data\":[");
    for (index, &seed) in seeds.iter().enumerate() {
        if index > 0 {
            out.put(b",");
        }
        out.put(b"{\"object\":\"embedding\",\"index\":");
        json::integer(&mut out, index as u64);
        out.put(b",\"embedding\":");
        let vector = unit_vector(seed, request.dimensions);
        match request.encoding {
            Encoding::Float => {
                for (at, number) in vector.iter().enumerate() {
                    out.put(if at == 0 { b"[" } else { b"," });
                    out.put(number.to_string().as_bytes());
                }
                out.put(b"]}");
            }
            Encoding::Base64 => {
                out.put(b"\"");
                base64(vector.iter().flat_map(|x| x.to_le_bytes()), &mut out);
                out.put(b"\"}");
            }
        }
    }
    out.put(b"],\"usage\":{\"prompt_tokens\":");
    json::integer(&mut out, prompt_tokens);
    out.put(b",\"total_tokens\":");
    json::integer(&mut out, prompt_tokens);
    out.put(b",\"completion_tokens\":0,\"prompt_tokens_details\":null}}");
    out
}

/// Appends `bytes` in Base64 with padding (RFC 4648, section 4).
fn base64(bytes: impl Iterator<Item = u8>, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = bytes.peekable();
    while bytes.peek().is_some() {
        let group = [bytes.next(), bytes.next(), bytes.next()];
        let count = group.iter().flatten().count();
        let word = group
            .iter()
            .fold(0, |word, byte| word << 8 | u32::from(byte.unwrap_or(0)));
        for at in 0..4 {
            out.push(if at <= count {
                DIGITS[(word >> (18 - 6 * at) & 63) as usize]
            } else {
                b'='
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::parse_completion;

    #[test]
    fn base64_is_that_of_the_rfc() {
        // RFC 4648, section 10.
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            let mut out = Vec::new();
            base64(text.bytes(), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn vectors_have_length_one_and_different_inputs_are_independent() {
        for dimensions in [1, 2, 3, 1024, DIMENSIONS_MAX] {
            let vector = unit_vector(7, dimensions);
            let square: f64 = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            assert!((square - 1.0).abs() < 1e-5, "{dimensions}: {square}");
        }
        let (one, other) = (unit_vector(1, 1024), unit_vector(2, 1024));
        let dot: f32 = one.iter().zip(&other).map(|(x, y)| x * y).sum();
        assert!(dot.abs() < 0.2, "{dot}: seven standard deviations are 0.22");
    }

    #[test]
    fn errors_name_the_fields_of_this_api() {
        for (body, param) in [
            ("{}", "input"),
            ("{\"input\":[]}", "input"),
            ("{\"input\":\"\"}", "input"),
            ("{\"input\":{}}", "input"),
            ("{\"input\":[\"a\",1]}", "input"),
            ("{\"input\":\"a\",\"dimensions\":0}", "dimensions"),
            ("{\"input\":\"a\",\"dimensions\":8193}", "dimensions"),
            (
                "{\"input\":\"a\",\"encoding_format\":\"bytes\"}",
                "encoding_format",
            ),
            ("{\"input\":\"a\",\"encoding_format\":1}", "encoding_format"),
            ("{\"input\":\"a\",\"messages\":[]}", "messages"),
            (
                "{\"input\":\"a\",\"truncate_prompt_tokens\":1}",
                "truncate_prompt_tokens",
            ),
        ] {
            let error = parse_embeddings(body.as_bytes())
                .and_then(|request| parse_completion(&request.completion).map(|_| ()))
                .map_err(embedding_field_names)
                .expect_err(body);
            let found = error.param.unwrap_or_default();
            assert!(found.starts_with(param), "{body}: {found}");
        }
    }
}
