//! Answers that engines store for later requests (`/v1/responses`): a request that names one goes to its engine.
//!
//! Ids are learned from the answers as they pass, with the API key of the request. Engines do not tell the router's
//! keys apart, so the router does: an answer is for the key that made it, and any other one gets the 404 of an id that
//! is not stored. Clients choose no ids, which would replace the answers of others.
//!
//! An id that is not known, since the router was started again or has forgotten it, is asked for at the engines
//! (`GET /v1/responses/ID`) if the router has no keys. With keys it is refused, because its owner is not known.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use slipstream_base::{Role, WorkerId};
use tokio::task::JoinSet;

use super::body_fields::BodyFields;
use super::connection::Connection;
use super::engines::{Engine, Engines, State};
use super::failure::Failure;
use super::loops;
use super::paths::counts_only;
use super::stored_answers::{ID_BYTES_MAX, Outcome, Owner, StoredAnswers};
use crate::door::budget::ClientUse;
use crate::door::connection::Client;
use crate::door::http;
use crate::openai::{ApiError, response_not_found};
use crate::wire;

/// Ids that a shard asks engines for at a time. Each costs a request per engine.
const LOOKUPS_MAX: usize = 16;

/// Of these, ids that one client may have asked for at a time, on all shards.
const CLIENT_LOOKUPS_MAX: u64 = 4;

/// Limit of such a question.
const LOOKUP_TIME: Duration = Duration::from_secs(2);

/// Where new answers are made, and where stored ones are read.
pub(super) const CREATE: &str = "/v1/responses";
const READ: &str = "/v1/responses/";
/// Decodings of a path in which another spelling of it is looked for.
const DECODINGS: usize = 4;

/// The client whose request names a stored answer.
pub(super) struct Asker<'a> {
    pub(super) client: &'a Client,
    pub(super) owner: Owner,
    /// The request counts as no request of its client yet.
    pub(super) is_read: bool,
}

/// The stored answer that a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) id: String,
    /// The field that names it; `None`: the path does.
    param: Option<&'static str>,
}

impl Named {
    /// The answer that a request to `path` reads or continues. `previous` is `previous_response_id` of its body.
    pub(super) fn of(path: &str, previous: Option<String>) -> Option<Named> {
        if path == CREATE {
            return Some(Named {
                id: previous?,
                param: Some("previous_response_id"),
            });
        }
        if counts_only(path) {
            return None;
        }
        // `a%2Fb` is one part of the path; `a/cancel` are two.
        let part = path.strip_prefix(READ)?.split('/').next()?;
        let id = http::percent_decode(part);
        (!id.is_empty()).then_some(Named { id, param: None })
    }
}

/// Whether `path` is that of stored answers, in another spelling than [`CREATE`] and [`READ`] have. Engines decode paths,
/// so it would reach an answer that [`Named`] does not see.
pub(super) fn is_disguised(path: &str) -> bool {
    let is_plain = |path: &str| !path.bytes().any(|b| b == b'%' || b.is_ascii_uppercase());
    if is_path(path) || is_plain(path) {
        return false;
    }
    // Engines may compare without case, and a proxy before one may decode once more.
    let mut path = path.to_owned();
    for _ in 0..DECODINGS {
        let decoded = http::percent_decode(&path);
        if is_path(&decoded.to_ascii_lowercase()) {
            return true;
        }
        if decoded == path {
            break;
        }
        path = decoded;
    }
    false
}

/// Whether `path` is that of stored answers.
pub(super) fn is_path(path: &str) -> bool {
    path == CREATE || path.starts_with(READ)
}

/// Checks what a request that makes an answer says of ids. `seen`: its body, as far as it was read.
///
/// # Errors
/// 400: it chooses the id of its answer, or it may, since its body is not a JSON object that the router can read.
pub(super) fn check_new(seen: Option<&BodyFields>) -> Result<(), ApiError> {
    let Some(seen) = seen else {
        return Err(ApiError::bad_body(
            "the body is not a JSON object in UTF-8; send `/v1/responses` one, so that the router can check its ids",
        ));
    };
    if seen.chooses_id {
        return Err(ApiError::invalid(
            "request_id",
            "`request_id` would be the id of the response, which the engine chooses; leave it out",
        ));
    }
    if seen.has_two_previous {
        return Err(ApiError::invalid(
            "previous_response_id",
            "`previous_response_id` is given twice; give it once",
        ));
    }
    Ok(())
}

/// Lookups of a shard that are under way.
#[derive(Default)]
pub(super) struct Lookups(RefCell<usize>);

/// A place of the shard and one of the client, until it is dropped.
struct Lookup<'a> {
    of_shard: &'a RefCell<usize>,
    of_client: &'a ClientUse,
}

impl Lookups {
    /// # Errors
    /// 429: the client has too many. 503: all clients together have.
    fn begin<'a>(&'a self, client: &'a ClientUse) -> Result<Lookup<'a>, ApiError> {
        let mut open = self.0.borrow_mut();
        if *open >= LOOKUPS_MAX {
            return Err(ApiError::overloaded(
                "too many stored responses are being looked up at the engines; try again",
                1,
            ));
        }
        if !client.begin_lookup(CLIENT_LOOKUPS_MAX) {
            return Err(ApiError::too_many(format!(
                "{CLIENT_LOOKUPS_MAX} stored responses of this client are being looked up at the engines, which \
                 is the limit; wait until some are found"
            )));
        }
        *open += 1;
        Ok(Lookup {
            of_shard: &self.0,
            of_client: client,
        })
    }
}

impl Drop for Lookup<'_> {
    fn drop(&mut self) {
        *self.of_shard.borrow_mut() -= 1;
        self.of_client.end_lookup();
    }
}

/// Checks that `owner` may have the answer `named`.
///
/// # Errors
/// 404: it may not, or nobody knows whose it is.
pub(super) fn check_owner(
    stored: &StoredAnswers,
    named: &Named,
    owner: Owner,
) -> Result<(), ApiError> {
    let outcome = match stored.owner(&named.id) {
        Some(of) if of == owner => return Ok(()),
        None if owner == Owner::Open => return Ok(()), // the engines are asked
        Some(_) => Outcome::Denied,
        None => Outcome::Unknown,
    };
    stored.count(outcome);
    // One text for both: it does not say whether there is such an answer.
    Err(response_not_found(
        named.param.unwrap_or("response_id"),
        &named.id,
    ))
}

/// The engine that stores the answer `named`, of those of `only`. `None`: any may be asked, since none is known to.
/// [`check_owner`] comes before.
///
/// # Errors
/// 404 or 409: its engine is gone, or takes no requests now. 429, 503: too many ids are being looked up.
pub(super) async fn engine_of(
    engines: &Arc<Engines>,
    lookups: &Lookups,
    asker: Asker<'_>,
    named: &Named,
    authorization: Option<Bytes>,
    only: Option<&[WorkerId]>,
) -> Result<Option<WorkerId>, ApiError> {
    let stored = &engines.stored;
    if let Some(holder) = stored.holder(&named.id) {
        let members = engines.members();
        let member = members.get(holder.worker.index()).and_then(Option::as_ref);
        let Some(engine) = member.filter(|of| of.id == holder.id) else {
            stored.count(Outcome::Gone);
            return Err(ApiError::response_gone(&named.id, named.param, &holder.url));
        };
        if engine.is_draining() || engine.state() == State::Down {
            stored.count(Outcome::Gone);
            let state = engine.state_name();
            return Err(ApiError::response_unavailable(
                &named.id,
                named.param,
                &holder.url,
                state,
            ));
        }
        stored.count(Outcome::Known);
        return Ok(Some(holder.worker));
    }
    let mut asked = engines.each();
    if asked.len() < 2 {
        return Ok(None);
    }
    asked.retain(|engine| {
        let worker = engine.spec.worker;
        engine.spec.role != Role::Prefill
            && engine.takes_requests()
            && !engine.is_mirror()
            && only.is_none_or(|only| only.binary_search(&worker).is_ok())
    });
    if named.id.len() > ID_BYTES_MAX {
        stored.count(Outcome::Unknown);
        return Ok(None);
    }
    // It costs a request per engine: reads, which count as no request else, count as one here.
    let admitted = if asker.is_read {
        asker.client.admit()
    } else {
        Ok(())
    };
    let lookup = admitted.and_then(|()| lookups.begin(asker.client.counts()));
    let _lookup = lookup.inspect_err(|_| stored.count(Outcome::Refused))?;
    let path: Rc<str> = format!("{READ}{}", escaped(&named.id)).into();
    let mut questions = JoinSet::new();
    for engine in asked {
        let (path, authorization) = (path.clone(), authorization.clone());
        let limit = engines.settings.connect_timeout;
        questions.spawn_local(async move {
            let has = has(&engine, &path, authorization.as_deref(), limit);
            let has = tokio::time::timeout(LOOKUP_TIME, has).await;
            matches!(has, Ok(Ok(true))).then_some(engine)
        });
    }
    // The other questions end with the set.
    while let Some(found) = questions.join_next().await {
        if let Ok(Some(engine)) = found {
            stored.remember(&named.id, engine.storing(), asker.owner);
            stored.count(Outcome::Asked);
            return Ok(Some(engine.spec.worker));
        }
    }
    stored.count(Outcome::Unknown);
    Ok(None)
}

/// Whether `engine` answers `GET path` with 200.
async fn has(
    engine: &Engine,
    path: &str,
    authorization: Option<&[u8]>,
    connect_timeout: Duration,
) -> Result<bool, Failure> {
    let mut connection = Connection::open(engine, connect_timeout).await?;
    let head = wire::write_head(
        &Method::GET,
        [&engine.spec.url.prefix, path],
        &engine.authority,
        engine.authorization.as_deref().or(authorization),
        &[b"connection: close\r\n", loops::line()].concat(),
        0,
    );
    let none = [Bytes::new(), Bytes::new()];
    connection.send(head, &none).await?;
    let head = connection.read_head(&Method::GET).await?;
    Ok(head.status == StatusCode::OK)
}

/// `id` as one part of a path: everything but letters, digits, `-` and `_` is escaped, dots as well.
fn escaped(id: &str) -> String {
    let mut out = String::with_capacity(id.len());
    for byte in id.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') {
            out.push(byte.into());
        } else {
            let _ = write!(out, "%{byte:02X}"); // into memory
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::UpstreamConfig;

    use super::super::engines::tests::{at, engines};
    use super::*;

    #[test]
    fn requests_name_answers_by_path_or_field() {
        let id = |path: &str| Named::of(path, None).map(|named| named.id);
        assert_eq!(id("/v1/responses/resp_1"), Some("resp_1".into()));
        assert_eq!(id("/v1/responses/resp_1/cancel"), Some("resp_1".into()));
        assert_eq!(id("/v1/responses/a%2Fb%25"), Some("a/b%".into()));
        for path in ["/v1/responses", "/v1/responses/", "/v1/completions"] {
            assert_eq!(id(path), None, "{path}");
        }
        let named = Named::of(CREATE, Some("r".into())).unwrap();
        assert_eq!(named.param, Some("previous_response_id"));
        assert_eq!(Named::of("/v1/completions", Some("r".into())), None);
        // As a part of a path it cannot leave the folder of stored answers.
        assert_eq!(escaped("../a b/ä"), "%2E%2E%2Fa%20b%2F%C3%A4");
        assert_eq!(http::percent_decode(&escaped("../a b/ä")), "../a b/ä");
    }

    #[test]
    fn one_client_leaves_lookups_for_others() {
        let lookups = Lookups::default();
        let clients: Vec<ClientUse> = (0..5).map(|_| ClientUse::default()).collect();
        let status = |client: &ClientUse| lookups.begin(client).err().map(|error| error.status);
        let mut open = Vec::new();
        for client in &clients[..4] {
            for _ in 0..CLIENT_LOOKUPS_MAX {
                open.push(lookups.begin(client).unwrap());
            }
            // The last client of those has the last places of the shard.
            let expected = if open.len() < LOOKUPS_MAX { 429 } else { 503 };
            assert_eq!(status(client), Some(expected));
        }
        assert_eq!(status(&clients[4]), Some(503));
        open.remove(0);
        assert_eq!(status(&clients[1]), Some(429));
        assert_eq!(status(&clients[4]), None);
        drop(open);
        assert_eq!(*lookups.0.borrow(), 0);
        for client in &clients {
            assert!(client.begin_lookup(1), "a place was not given back");
        }
    }

    #[test]
    fn an_answer_is_for_the_key_that_made_it() {
        let engines = engines(1, &UpstreamConfig::default());
        let (stored, engine) = (&engines.stored, at(&engines, 0));
        let (one, two) = (Owner::Key(1), Owner::Key(2));
        let named = |id: &str| Named::of(CREATE, Some(id.into())).unwrap();
        let may = |id: &str, owner| check_owner(stored, &named(id), owner).map_err(|e| e.status);
        stored.remember("a", engine.storing(), one);
        assert_eq!((may("a", one), may("a", two)), (Ok(()), Err(404)));
        // Whose it is is not known: nobody's with keys, everybody's without.
        assert_eq!((may("b", one), may("b", Owner::Open)), (Err(404), Ok(())));
        let text = |id: &str| check_owner(stored, &named(id), two).unwrap_err().message;
        assert_eq!(text("a").replace("`a`", "`b`"), text("b"));
        // An engine that gives one id twice: from then on it is nobody's, whoever asks again.
        stored.remember("a", engine.storing(), two);
        stored.remember("a", engine.storing(), one);
        assert_eq!((may("a", one), may("a", two)), (Err(404), Err(404)));
    }

    #[test]
    fn other_spellings_of_the_path_are_seen() {
        for path in [
            "/v1/%72esponses/a",
            "/v1%2Fresponses",
            "/v1/responses%2Fa",
            "/%761/responses/",
            "/v1/Responses/a",
            "/V1/RESPONSES",
            "/v1/responses%252fa",
            "/v1/%2572esponses/a",
        ] {
            assert!(is_disguised(path), "{path}");
        }
        for path in [
            "/v1/responses",
            "/v1/responses/",
            "/v1/responses/a%2Fb",
            "/v1/completions",
            "/v1/Files/responses%20of%20May",
        ] {
            assert!(!is_disguised(path), "{path}");
        }
    }
}
