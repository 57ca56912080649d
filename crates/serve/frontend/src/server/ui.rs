//! `/ui`: one page that shows the fleet and its latencies, and `/ui.json`, the figures that it polls.
//!
//! `/` leads to the page. Browsers look for an icon at `/favicon.ico` whatever they show; its absence is no error.
//!
//! The figures are those of `/metrics`, as JSON and without the series that the page does not show. Both paths
//! need no API key, as `/metrics` does not. The page keeps the history itself: the server has no state per viewer.

use hyper::body::Incoming;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, LOCATION, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::Value;

use crate::door::body::HttpBody;
use crate::door::http::{json as json_response, status_only};
use crate::openai::ApiError;
use crate::server::figures::snapshot;
use crate::server::plane::Plane;

const PAGE: &str = include_str!("../../assets/ui.html");

/// The page loads nothing but itself and its figures, and no other page may frame it.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What a path of the page answers.
#[derive(Clone, Copy)]
enum Part {
    Page,
    Figures,
    /// The page is elsewhere, relative to the path: a proxy may serve it under a prefix.
    Redirect(&'static str),
    NoIcon,
}

impl Part {
    fn of(path: &str) -> Option<Part> {
        match path {
            "/ui" => Some(Part::Page),
            "/ui.json" => Some(Part::Figures),
            "/" => Some(Part::Redirect("ui")),
            "/ui/" => Some(Part::Redirect("../ui")),
            "/favicon.ico" => Some(Part::NoIcon),
            _ => None,
        }
    }
}

/// Whether `path` belongs to the page.
pub(crate) fn answers(path: &str) -> bool {
    Part::of(path).is_some()
}

/// Answers the paths of the page; `None` for other paths.
pub(crate) fn answer(
    plane: &Plane,
    request: &Request<Incoming>,
    id: &str,
) -> Option<Result<Response<HttpBody>, ApiError>> {
    let part = Part::of(request.uri().path())?;
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let (method, path) = (request.method().as_str(), request.uri().path());
        return Some(Err(ApiError::method_not_allowed(method, path, "GET, HEAD")));
    }
    Some(match part {
        Part::Page => Ok(page()),
        Part::Figures => figures(plane, id),
        Part::Redirect(to) => {
            let mut response = status_only(StatusCode::FOUND);
            let headers = response.headers_mut();
            headers.insert(LOCATION, HeaderValue::from_static(to));
            Ok(response)
        }
        Part::NoIcon => {
            let mut response = status_only(StatusCode::NO_CONTENT);
            let headers = response.headers_mut();
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("max-age=86400"));
            Ok(response)
        }
    })
}

fn page() -> Response<HttpBody> {
    let mut response = json_response(200, PAGE.as_bytes().to_vec());
    let headers = response.headers_mut();
    let text = HeaderValue::from_static;
    headers.insert(CONTENT_TYPE, text("text/html; charset=utf-8"));
    headers.insert(CONTENT_SECURITY_POLICY, text(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, text("nosniff"));
    headers.insert(REFERRER_POLICY, text("no-referrer"));
    headers.insert(CACHE_CONTROL, text("no-cache"));
    response
}

fn figures(plane: &Plane, id: &str) -> Result<Response<HttpBody>, ApiError> {
    let shard = plane.shard();
    let page = slipstream_metrics::Format::OpenMetrics.page(&shard.registry);
    let text = page.map_err(|error| {
        tracing::error!(%error, "metrics could not be encoded");
        ApiError::internal(id)
    })?;
    let mut body = snapshot(&text);
    body["started"] = shard.service.created.into();
    body["at_ms"] = (slipstream_planes::clock::monotonic_ns() / 1_000_000).into();
    // In front of real engines the name is a default, unless KV events are followed.
    body["model"] = match plane {
        Plane::Workers(_) => shard.service.model.as_str().into(),
        Plane::Engines(_) => Value::Null,
    };
    let mut response = json_response(200, body.to_string().into_bytes());
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No address, so that the page works without a network and no other host learns of the visit.
    #[test]
    fn the_page_requests_nothing_else() {
        for word in ["src=", "url(", "@import", "http://", "https://", "//cdn"] {
            let others = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!others.contains(word), "{word}");
        }
        assert_eq!(
            PAGE.matches("href=").count(),
            PAGE.matches("href=\"metrics\"").count() + 1
        );
        assert!(POLICY.starts_with("default-src 'none'"));
    }
}
