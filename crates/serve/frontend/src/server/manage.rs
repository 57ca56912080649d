//! Routes of vLLM for operators: adapters, the prefix cache, sleep.

use hyper::Response;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde_json::json;

use crate::door::body::HttpBody;
use crate::door::http;
use crate::door::management::{KV_CACHE, WEIGHTS};
use crate::door::service::Service;
use crate::openai::{AdapterRequest, ApiError, parse_adapter};

/// A route for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manage {
    LoadAdapter,
    UnloadAdapter,
    ResetPrefixCache,
    Sleep,
    WakeUp,
    IsSleeping,
}

/// Answers a request to one of the routes.
pub(crate) fn answer(
    service: &Service,
    route: Manage,
    query: &str,
    body: &[u8],
) -> Result<Response<HttpBody>, ApiError> {
    let management = &service.management;
    let values = |name: &'static str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs
            .filter(move |(key, _)| *key == name)
            .map(|(_, value)| value)
    };
    let answer = match route {
        Manage::LoadAdapter => return load_adapter(service, body),
        Manage::UnloadAdapter => return unload_adapter(service, body),
        Manage::ResetPrefixCache => {
            management.reset();
            json!({"success": true})
        }
        Manage::Sleep => {
            let level = values("level").next_back().unwrap_or("1");
            let level = level
                .parse()
                .ok()
                .filter(|level| *level <= 2)
                .ok_or_else(|| ApiError::invalid("level", "`level` must be 0, 1 or 2"))?;
            management.sleep(level);
            tracing::info!(level, "asleep: requests wait for /wake_up");
            json!({"status": "sleeping", "level": level})
        }
        Manage::WakeUp => {
            let tags: Vec<&str> = values("tags").collect();
            let mut parts = 0;
            for tag in &tags {
                parts |= match *tag {
                    "weights" => WEIGHTS,
                    "kv_cache" => KV_CACHE,
                    _ => {
                        let message = "`tags` must be `weights` or `kv_cache`, or left out";
                        return Err(ApiError::invalid("tags", message));
                    }
                };
            }
            let parts = if tags.is_empty() {
                WEIGHTS | KV_CACHE
            } else {
                parts
            };
            let status = if management.wake(parts) {
                "awake"
            } else {
                "sleeping"
            };
            let tags = (!tags.is_empty()).then_some(tags);
            json!({"status": status, "tags": tags})
        }
        Manage::IsSleeping => json!({"is_sleeping": management.is_sleeping()}),
    };
    Ok(http::json(200, answer.to_string().into_bytes()))
}

/// An answer in plain text, as vLLM has it here.
fn text(text: String) -> Response<HttpBody> {
    let mut response = http::json(200, text.into_bytes());
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

fn load_adapter(service: &Service, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    let AdapterRequest {
        name,
        path,
        in_place,
    } = parse_adapter(body)?;
    let path = path.filter(|path| !path.is_empty()).ok_or_else(|| {
        ApiError::invalid(
            "lora_path",
            "`lora_path` is missing; modelled engines read nothing from it, and vLLM requires it",
        )
    })?;
    let loaded = service
        .management
        .load(&name, &path, &service.model, in_place);
    loaded.map_err(|error| ApiError::invalid("lora_name", error.to_string()))?;
    Ok(text(format!(
        "Success: LoRA adapter '{name}' added successfully."
    )))
}

fn unload_adapter(service: &Service, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    let AdapterRequest { name, .. } = parse_adapter(body)?;
    if !service.management.unload(&name) {
        let adapters = service.management.adapters();
        let loaded: Vec<&str> = adapters.iter().map(|a| a.name.as_str()).collect();
        return Err(ApiError::model_not_found(&name, &loaded));
    }
    Ok(text(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    )))
}
