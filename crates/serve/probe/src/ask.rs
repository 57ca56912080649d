//! Asks an engine for its facts.

use std::time::Duration;

use futures_util::future::join_all;

use slipstream_base::EngineKind;

use crate::facts::{self, Asked, Endpoint, EngineFacts, Outcome};
use crate::http::{Client, UrlError};

/// Why there are no facts.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The URL is not an engine's address.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// No endpoint answered. The engine may still be starting: ask again later.
    #[error(
        "no answer from {url}: {why}; is the engine running, and its address reachable from here?"
    )]
    Unreachable {
        /// Base URL.
        url: String,
        /// Cause of the first failure.
        why: String,
    },
    /// The engine refuses the key, or needs one.
    #[error("{url} answered {path} with status {status}; give the engine's API key")]
    Refused {
        /// Base URL.
        url: String,
        /// Path of the request.
        path: &'static str,
        /// Status of the answer.
        status: u16,
    },
    /// It answers, but not as an inference engine.
    #[error("{url} does not answer as an inference engine: {}", list(asked))]
    NotAnEngine {
        /// Base URL.
        url: String,
        /// Every request and its outcome.
        asked: Vec<Asked>,
    },
}

fn list(asked: &[Asked]) -> String {
    let each = asked
        .iter()
        .map(|a| format!("GET {}: {}", a.path, a.outcome));
    each.collect::<Vec<_>>().join("; ")
}

/// Facts of the engine at `url`, such as `http://gpu1:8000`. Every endpoint is asked at once, once,
/// and each must be complete within `deadline`; endpoints that fail are listed in
/// [`EngineFacts::asked`]. For `https://` use [`ask_client`].
///
/// # Errors
/// [`AskError`].
pub async fn ask(
    url: &str,
    api_key: Option<&str>,
    deadline: Duration,
) -> Result<EngineFacts, AskError> {
    ask_client(&Client::new(url, api_key, None)?, deadline).await
}

/// [`ask`] with a client that has keys and TLS.
///
/// # Errors
/// [`AskError`].
pub async fn ask_client(client: &Client, deadline: Duration) -> Result<EngineFacts, AskError> {
    let answers = join_all(
        Endpoint::ALL.map(async |endpoint| (endpoint, client.get(endpoint.path(), deadline).await)),
    )
    .await;
    let facts = facts::learn(client.base(), client.host(), &answers);
    check(facts)
}

/// Facts of something that is an engine.
fn check(facts: EngineFacts) -> Result<EngineFacts, AskError> {
    let first_failure = |all: &[Asked]| {
        all.iter().find_map(|asked| match &asked.outcome {
            Outcome::Failed(why) => Some(why.clone()),
            _ => None,
        })
    };
    let failed = |asked: &Asked| matches!(asked.outcome, Outcome::Failed(_));
    if facts.asked.iter().all(failed) {
        return Err(AskError::Unreachable {
            why: first_failure(&facts.asked).unwrap_or_default(),
            url: facts.url,
        });
    }
    if !facts.models.is_empty() {
        return Ok(facts);
    }
    for asked in &facts.asked {
        if let Outcome::Status(status @ (401 | 403)) = asked.outcome {
            return Err(AskError::Refused {
                url: facts.url.clone(),
                path: asked.path,
                status,
            });
        }
    }
    if facts.kind == EngineKind::OpenAi {
        return Err(AskError::NotAnEngine {
            url: facts.url,
            asked: facts.asked,
        });
    }
    // Recognized by other answers, without a model: it may be loading one.
    Ok(facts)
}
