//! Request paths: which ones are forwarded to engines, which only compute, and which may be retried.

use hyper::Method;

use crate::door::http;

/// Paths that count tokens, or write text as tokens or tokens as text, and generate nothing. Sources: as of [`FORWARDED`],
/// and `/v1/responses/input_tokens` of OpenAI's API.
static COUNTS: &[&str] = &[
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/responses/render",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
];

/// Paths that are forwarded in addition to `/v1/` and [`COUNTS`]: inference requests. Sources: the API
/// servers of vLLM (`vllm/entrypoints`), SGLang (`http_server.py`) and llama.cpp (`server.cpp`).
static FORWARDED: &[&str] = &[
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/embeddings",
    "/embedding",
    "/invocations",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/encode",
    "/completion",
    "/completions",
    "/chat/completions",
    "/infill",
    "/reranking",
    "/props",
    "/get_model_info",
    "/model_info",
    "/openapi.json",
];

/// Paths under `/v1/` that only compute: a request there that is sent twice leaves an engine as one does. An answer of
/// `/v1/responses` may be stored, but one that never reached its client has an id that nobody knows.
static COMPUTES: &[&str] = &[
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/moderations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
];

/// Whether a request may be sent to an engine after another one, or the same, may have received it. Others (files,
/// batches, and paths that no one here knows) would then be done twice.
pub(super) fn may_repeat(method: &Method, path: &str) -> bool {
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => true,
        Method::POST => [COMPUTES, FORWARDED, COUNTS]
            .iter()
            .any(|paths| paths.contains(&path)),
        _ => false,
    }
}

/// Paths under `/v1/` that change an engine: they would reach one of several.
static CHANGES: &[&str] = &["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

pub(super) fn is_forwarded(path: &str, more: &[String]) -> bool {
    // As the engine's server reads it: `/v1/%6coad_lora_adapter` names that path as well.
    let path = &*http::percent_decode(path);
    let listed = more
        .iter()
        .any(|of| path == of || of.ends_with('/') && path.starts_with(of.as_str()));
    let known = path.starts_with("/v1/") || FORWARDED.contains(&path) || COUNTS.contains(&path);
    // A proxy on the way may resolve dots and joins.
    let plain = !path
        .split(['/', '\\'])
        .any(|part| part == ".." || part == ".")
        && !path.contains("//");
    plain && (listed || known && !CHANGES.contains(&path.trim_end_matches('/')))
}

/// Paths whose prompts may be computed by another engine than their answers.
pub(super) static GENERATES: &[&str] = &["/v1/completions", "/v1/chat/completions"];

/// Whether requests to `path` only count or convert tokens: nothing is charged to a key's tokens.
pub(super) fn counts_only(path: &str) -> bool {
    COUNTS.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_that_compute_are_repeated() {
        for path in [
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/rerank",
            "/tokenize",
        ] {
            assert!(may_repeat(&Method::POST, path), "{path}");
            assert!(!may_repeat(&Method::DELETE, path), "{path}");
        }
        for path in [
            "/v1/files",
            "/v1/batches",
            "/v1/fine_tuning/jobs",
            "/v1/responses/resp_1/cancel",
            "/v1/unheard_of",
            "/custom",
        ] {
            assert!(may_repeat(&Method::GET, path), "{path}");
            for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
                assert!(!may_repeat(&method, path), "{method} {path}");
            }
        }
    }

    #[test]
    fn paths_that_count_are_told_from_those_that_generate() {
        for path in [
            "/tokenize",
            "/detokenize",
            "/v1/tokenize",
            "/v1/detokenize",
            "/apply-template",
            "/v1/completions/render",
            "/v1/chat/completions/render",
            "/v1/chat/completions/derender",
            "/v1/responses/render",
            "/v1/responses/input_tokens",
            "/v1/messages/count_tokens",
        ] {
            assert!(counts_only(path), "{path}");
            assert!(may_repeat(&Method::POST, path), "{path}");
            assert!(is_forwarded(path, &[]), "{path}");
        }
        for path in COMPUTES.iter().chain(FORWARDED).chain(GENERATES) {
            assert!(!counts_only(path), "{path}");
            let names = ["token", "render", "template", "count"];
            assert!(!names.iter().any(|of| path.contains(of)), "{path}");
        }
    }

    #[test]
    fn paths_that_change_engines_are_not_forwarded() {
        let more = vec!["/custom".to_owned(), "/tools/".to_owned()];
        for path in [
            "/v1/completions",
            "/v1/audio/transcriptions",
            "/v2/rerank",
            "/tokenize",
            "/custom",
            "/tools/a/b",
        ] {
            assert!(is_forwarded(path, &more), "{path}");
        }
        for path in [
            "/v1/load_lora_adapter",
            "/sleep",
            "/reset_prefix_cache",
            "/v2/repository/models/m/unload",
            "/v2/logging",
            "/v2/systemsharedmemory/register",
            "/shutdown",
            "/custom/x",
            "/v1/../sleep",
            "/v1/%2e%2E/sleep",
            "/v1/%6coad_lora_adapter",
            "/v1/load_lora_adapter/",
            "/v1//x",
            "/",
        ] {
            assert!(!is_forwarded(path, &more), "{path}");
        }
    }
}
