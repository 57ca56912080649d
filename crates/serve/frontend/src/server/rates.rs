//! `/admin/faults`: the rates of errors and broken streams, as owners of the admin key change them.

use std::rc::Rc;

use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{Method, Request, Response};
use serde::Deserialize;
use slipstream_config::cluster::FaultsConfig;

use crate::door::body::HttpBody;
use crate::door::connection::{Client, Owner};
use crate::door::http;
use crate::door::service::Admission;
use crate::door::shard::Shard;
use crate::openai::ApiError;

/// Body of an admin request at most, bytes.
const BODY_BYTES_MAX: u64 = 4 << 10;
/// Longest stall, s.
const STALL_S_MAX: f64 = 86_400.0;

/// Fields of an admin request; those that are not sent stay.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    error_429: Option<f64>,
    error_500: Option<f64>,
    stall: Option<f64>,
    stall_s: Option<f64>,
    cut: Option<f64>,
    seed: Option<u64>,
}

/// Answers a request to `/admin/faults`.
pub(crate) async fn admin(
    shard: &Rc<Shard>,
    owner: &Rc<Owner>,
    request: Request<Incoming>,
) -> Result<Response<HttpBody>, ApiError> {
    let faults = &shard.service.faults;
    let (method, path) = (request.method().clone(), request.uri().path());
    let admin_key = &shard.service.admin_key;
    if admin_key.is_empty() {
        // Without a key for it there is no such API.
        return Err(ApiError::route_not_found(method.as_str(), path));
    }
    let authorization = request.headers().get(AUTHORIZATION);
    let admission = admin_key.admit(authorization.map(HeaderValue::as_bytes));
    let Admission::Key(key) = admission else {
        return Err(ApiError::unauthorized());
    };
    match method {
        Method::GET | Method::HEAD => {}
        Method::DELETE => faults.set(FaultsConfig {
            seed: faults.rates().seed,
            ..FaultsConfig::default()
        }),
        Method::POST => {
            let client = Client::new(owner.clone(), Some(key));
            let body = request.into_body();
            let body = http::read_admin_body(shard, &client, body, BODY_BYTES_MAX).await?;
            faults.set(changed(faults.rates(), &body)?);
        }
        method => {
            return Err(ApiError::method_not_allowed(
                method.as_str(),
                "/admin/faults",
                "GET, HEAD, POST, DELETE",
            ));
        }
    }
    Ok(http::json(200, faults.json()))
}

fn changed(mut config: FaultsConfig, body: &[u8]) -> Result<FaultsConfig, ApiError> {
    let change: Change = serde_json::from_slice(body).map_err(|error| {
        ApiError::bad_body(format!("the body is not a change of faults: {error}"))
    })?;
    for (to, from) in [
        (&mut config.error_429, change.error_429),
        (&mut config.error_500, change.error_500),
        (&mut config.stall, change.stall),
        (&mut config.cut, change.cut),
    ] {
        *to = from.unwrap_or(*to);
    }
    config.stall_s = change.stall_s.unwrap_or(config.stall_s);
    config.seed = change.seed.unwrap_or(config.seed);
    for (name, rate) in ["error_429", "error_500", "stall", "cut"]
        .into_iter()
        .zip(config.rates())
    {
        if !(0.0..=1.0).contains(&rate) {
            return Err(ApiError::invalid(
                name,
                format!("`{name}` is {rate}; it must be from 0 to 1"),
            ));
        }
    }
    if !(0.0..=STALL_S_MAX).contains(&config.stall_s) {
        return Err(ApiError::invalid(
            "stall_s",
            format!("`stall_s` must be from 0 to {STALL_S_MAX}"),
        ));
    }
    let sum: f64 = config.rates().iter().sum();
    if sum > 1.0 {
        return Err(ApiError::invalid(
            "error_429",
            format!(
                "the rates add up to {sum}; a request has one fault at most: lower them to 1 in all"
            ),
        ));
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates() -> FaultsConfig {
        FaultsConfig {
            error_429: 0.1,
            error_500: 0.2,
            stall: 0.05,
            cut: 0.15,
            seed: 3,
            ..FaultsConfig::default()
        }
    }

    #[test]
    fn changes_that_cannot_be_are_refused_and_change_nothing() {
        for (body, param) in [
            ("{\"cut\":1.5}", Some("cut")),
            ("{\"cut\":-0.1}", Some("cut")),
            ("{\"stall_s\":-1}", Some("stall_s")),
            ("{\"stall_s\":1e300}", Some("stall_s")),
            ("{\"error_500\":0.9}", Some("error_429")),
            ("{\"error_418\":0.1}", None),
            ("{\"cut\":\"1\"}", None),
            ("[]", None),
            ("", None),
        ] {
            let error = changed(rates(), body.as_bytes()).expect_err(body);
            assert_eq!(
                (error.status, error.param.as_deref()),
                (400, param),
                "{body}"
            );
        }
        let config = changed(rates(), b"{\"cut\":0,\"seed\":9}").unwrap();
        assert_eq!(
            config,
            FaultsConfig {
                cut: 0.0,
                seed: 9,
                ..rates()
            }
        );
    }
}
