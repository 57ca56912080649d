//! A client's request, as engines get it, and the resources that it holds: stream permit, memory charge, recording.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use hyper::Method;
use slipstream_base::EngineKind;
use slipstream_base::{Role, WorkerId};
use slipstream_config::cluster::Resume;
use slipstream_dispatch as dispatch;

use super::api::{Api, StreamKind};
use super::body_fields::{BodyFields, READ_BYTES};
use super::disagg::{self, Change, Meeting, StageRequest};
use super::engines::{Engine, Engines};
use super::paths::may_repeat;
use super::record::Recording;
use super::settings::Settings;
use super::stored_answers;
use crate::door::budget::Charge;
use crate::door::connection::{Client, Owner};
use crate::door::metrics::Rejection;
use crate::door::service::Service;
use crate::door::shard::Shard;
use crate::openai::ApiError;
use crate::wire;

/// By it vLLM chooses the data-parallel rank of a request.
const X_DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";

/// The request as it is sent to engines.
pub(super) struct Exchange {
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    /// Header lines.
    pub(super) headers: Bytes,
    /// The client's `Authorization`, for engines without a key of their own.
    pub(super) authorization: Option<Bytes>,
    /// As the client sent it.
    pub(super) body: Bytes,
    /// Routing's view of it.
    pub(super) request: dispatch::Request,
    /// Set if it streams an answer that another engine could continue.
    pub(super) stream: Option<StreamKind>,
    /// The API, which determines how the answer ends, and the number of choices.
    pub(super) api: Api,
    pub(super) choices: u64,
    /// Whether the client named its preferred engine.
    pub(super) prefers: bool,
    /// Whether the request's fields allow its stream to continue, by tokens at least.
    pub(super) resumable: bool,
    /// Whether a continuation may use tokens, not only text.
    pub(super) by_tokens: bool,
    /// Whether the router requests the answer's token ids from vLLM, which the client did not.
    pub(super) wants_tokens: Cell<bool>,
    /// Whether the client's body has that field, to another end.
    pub(super) names_tokens: bool,
    /// `live.request_timeout_s` ends it at this time, ns.
    pub(super) deadline_ns: Option<u64>,
    /// Whether an engine may get it after another one may have got it.
    pub(super) repeats: bool,
    /// Whether the client asked for a stream.
    pub(super) streams: bool,
    /// Its place among the open streams.
    pub(super) permit: StreamPermit,
    /// The client's request.
    pub(super) owner: Rc<Owner>,
    /// The engine may store its answer, whose id is not known yet, for this one.
    pub(super) stores: Cell<Option<stored_answers::Owner>>,
    /// Its line in the record, if there is one.
    pub(super) recording: Option<RefCell<Recording>>,
}

/// Largest body for which token ids are requested: the first event has the ids of the prompt, some 1.6 bytes per byte of
/// text.
const IDS_BODY_BYTES_MAX: usize = 512 << 10;

fn stream_kind(path: &str, seen: &BodyFields, resume: Resume) -> Option<StreamKind> {
    if !seen.stream || resume == Resume::Off {
        return None;
    }
    match path {
        "/v1/completions" => Some(StreamKind::Completion),
        "/v1/chat/completions" => Some(StreamKind::Chat),
        _ => None,
    }
}

/// What makes an [`Exchange`]: fields of the same name, and what the others follow from.
pub(super) struct ExchangeParts<'a> {
    pub(super) settings: &'a Settings,
    pub(super) method: Method,
    pub(super) path: &'a str,
    pub(super) target: String,
    pub(super) headers: Bytes,
    pub(super) authorization: Option<Bytes>,
    pub(super) body: Bytes,
    pub(super) seen: &'a BodyFields,
    pub(super) request: dispatch::Request,
    pub(super) choices: u64,
    pub(super) prefers: bool,
    pub(super) deadline_ns: Option<u64>,
    pub(super) permit: StreamPermit,
    pub(super) owner: Rc<Owner>,
    pub(super) stores: Option<stored_answers::Owner>,
    pub(super) recording: Option<RefCell<Recording>>,
}

/// Field of a body that asks vLLM for the tokens of its answer.
const WITH_TOKENS: &[u8] = b"\"return_token_ids\":true,";

impl Exchange {
    /// A client's request, once it is known which engines may get it.
    pub(super) fn new(parts: ExchangeParts<'_>) -> Exchange {
        let (seen, resume) = (parts.seen, parts.settings.resume);
        let stream = stream_kind(parts.path, seen, resume);
        let is_exact = resume == Resume::Tokens;
        let resumable =
            stream.is_some() && !seen.whole && !seen.hinders && (is_exact || !seen.has_tools);
        // Placeholders of images are not a prompt.
        let by_tokens = resumable && is_exact && !seen.has_media;
        let is_short = parts.body.len() <= IDS_BODY_BYTES_MAX;
        Exchange {
            wants_tokens: Cell::new(by_tokens && seen.return_token_ids != Some(true) && is_short),
            names_tokens: seen.return_token_ids.is_some(),
            stream,
            api: Api::of(&parts.method, parts.path),
            repeats: may_repeat(&parts.method, parts.path),
            resumable,
            by_tokens,
            streams: seen.stream,
            method: parts.method,
            target: parts.target,
            headers: parts.headers,
            authorization: parts.authorization,
            body: parts.body,
            request: parts.request,
            choices: parts.choices,
            prefers: parts.prefers,
            deadline_ns: parts.deadline_ns,
            permit: parts.permit,
            owner: parts.owner,
            stores: Cell::new(parts.stores),
            recording: parts.recording,
        }
    }

    /// The request for the rest of an answer whose engine is lost, also if the client named that engine: `body` to `path`
    /// (`None`: its own) at one of the workers `only` (`None`: its own).
    pub(super) fn continuation(
        &self,
        body: Bytes,
        path: Option<&str>,
        only: Option<Arc<[WorkerId]>>,
    ) -> Exchange {
        let request = dispatch::Request {
            direct: None,
            only: only.or_else(|| self.request.only.clone()),
            ..self.request.clone()
        };
        Exchange {
            request,
            method: self.method.clone(),
            target: path.map_or_else(|| self.target.clone(), str::to_owned),
            headers: self.headers.clone(),
            authorization: self.authorization.clone(),
            body,
            stream: self.stream,
            api: path.map_or(self.api, |path| Api::of(&self.method, path)),
            choices: self.choices,
            prefers: false,
            resumable: self.resumable,
            by_tokens: self.by_tokens,
            wants_tokens: self.wants_tokens.clone(),
            names_tokens: self.names_tokens,
            deadline_ns: self.deadline_ns,
            repeats: self.repeats,
            streams: self.streams,
            permit: StreamPermit::shared(),
            owner: self.owner.clone(),
            stores: Cell::new(None), // such streams do not continue
            recording: None,         // the first one's counts on
        }
    }

    /// Leaves it to other engines than `worker`, if one of them takes requests: that one has just failed it, and may take
    /// some still.
    pub(super) fn avoid(&mut self, engines: &Engines, worker: WorkerId) {
        let members = engines.each();
        let others = members.iter().filter(|of| {
            let only = self.request.only.as_ref();
            of.spec.worker != worker && only.is_none_or(|only| only.contains(&of.spec.worker))
        });
        let others: Vec<&Arc<Engine>> = others.collect();
        let answers = |of: &&Arc<Engine>| {
            of.takes_requests() && !of.is_mirror() && of.spec.role != Role::Prefill
        };
        if others.iter().any(answers) {
            self.request.only = Some(others.iter().map(|of| of.spec.worker).collect());
        }
    }

    /// Notes something for the record, if there is one.
    pub(super) fn update_recording(&self, note: impl FnOnce(&mut Recording)) {
        if let Some(recording) = &self.recording {
            note(&mut recording.borrow_mut());
        }
    }

    /// Charges its body and `sent` bytes of its answer. False if there is no memory for them.
    pub(super) fn keep_sent(&self, sent: usize) -> bool {
        self.charge_answer(sent).is_ok()
    }

    /// Charges its body and `sent` bytes of its answer.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    pub(super) fn charge_answer(&self, sent: usize) -> Result<(), ApiError> {
        self.permit.grow_to(self.body.len() + sent)
    }

    /// Gives back the memory of its answer: nothing of it is kept.
    pub(super) fn keeps_body_only(&self) {
        if let Some(held) = &*self.permit.0.borrow() {
            let body = self.body.len() as u64;
            held.charge.borrow_mut().shrink_to(body);
        }
    }

    /// Gives back its place and its memory. Only its client can end it from here on.
    pub(super) fn release(&self) {
        if let Some(held) = self.permit.0.borrow_mut().take() {
            held.client.answered();
        }
    }

    /// Gives back its place. Returns its memory.
    pub(super) fn into_charge(self) -> Option<Charge> {
        let held = self.permit.0.borrow_mut().take()?;
        let charge = held.charge.borrow_mut().take_all();
        Some(charge)
    }

    /// Memory for a job on its body, of its client.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn charge_job(&self) -> Result<Charge, ApiError> {
        let held = self.permit.0.borrow();
        let held = held.as_ref().ok_or_else(ApiError::out_of_memory)?;
        held.client.charge(&held.shard.budget.memory, 0)
    }

    /// It as `engine` gets it.
    pub(super) fn outgoing(&self, engine: &Engine, stage: &StageRequest) -> Outgoing<'_> {
        Outgoing {
            method: &self.method,
            target: &self.target,
            headers: match stage.role {
                Role::Prefill => disagg::prefill_headers(&self.headers),
                Role::Both | Role::Decode => self.headers.clone(),
            },
            authorization: self.authorization.as_deref(),
            body: self.body_for(engine, stage),
            repeats: self.repeats,
            streams: self.streams,
            api: match stage.role {
                Role::Prefill => Api::Other,
                Role::Both | Role::Decode => self.api,
            },
        }
    }

    fn body_for(&self, engine: &Engine, stage: &StageRequest) -> [Bytes; 2] {
        let wants_tokens = self.wants_tokens.get() && engine.kind() == EngineKind::Vllm;
        let tokens: &'static [u8] = if wants_tokens { WITH_TOKENS } else { b"" };
        let before: Bytes = match &stage.change {
            Change::Body(body) => return [body.clone(), Bytes::new()],
            // The last field of a name wins.
            Change::None | Change::Before(_) if wants_tokens && self.names_tokens => {
                let more: &[u8] = match &stage.change {
                    Change::Before(fields) => fields,
                    _ => b"",
                };
                let end = self.body.iter().rposition(|&b| b == b'}');
                let end = end.unwrap_or(self.body.len());
                let tokens = tokens.strip_suffix(b",").unwrap_or(tokens);
                let last = [b",", more, tokens, b"}"].concat();
                return [self.body.slice(..end), last.into()];
            }
            Change::None => Bytes::from_static(tokens),
            Change::Before(fields) => [tokens, fields].concat().into(),
            Change::After(fields) => {
                let end = self.body.iter().rposition(|&b| b == b'}');
                let end = end.unwrap_or(self.body.len());
                return [self.body.slice(..end), [fields, &b"}"[..]].concat().into()];
            }
        };
        let start = self.body.iter().position(|&b| b == b'{');
        match start {
            Some(start) if !before.is_empty() => [
                [b"{", &*before].concat().into(),
                self.body.slice(start + 1..),
            ],
            _ => [self.body.clone(), Bytes::new()],
        }
    }

    /// The body for the engine that computes its prompt for another one; `None` if there is none. `params` as of
    /// [`disagg::prefill_body`].
    pub(super) async fn prefill_request(
        &self,
        shard: &Rc<Shard>,
        params: Option<String>,
    ) -> Option<StageRequest> {
        let body = if self.body.len() <= READ_BYTES {
            disagg::prefill_body(&self.body, params.as_deref())
        } else {
            let charge = self.charge_job().ok()?;
            let job =
                move |_: &Service, body: &[u8]| Ok(disagg::prefill_body(body, params.as_deref()));
            let done = shard.run(self.body.clone(), charge, job).await;
            done.ok().and_then(|(body, _)| body)
        };
        body.map(|body| StageRequest {
            role: Role::Prefill,
            change: Change::Body(body.into()),
        })
    }

    /// The requests by which `prefill` and the engine that answers meet.
    ///
    /// # Errors
    /// Why there are none, as a clause.
    pub(super) async fn meet(
        &self,
        shard: &Rc<Shard>,
        prefill: &Engine,
    ) -> Result<(PrefillRequest, StageRequest), String> {
        let protocol = (prefill.kv_protocol(), prefill.spec.kv_protocol.1);
        let draws = [shard.next_request_number(), shard.next_request_number()];
        let host = &prefill.spec.url.host;
        let meeting = Meeting::new(protocol, host, &prefill.kv_ids(), draws);
        let meeting = meeting.ok_or("its bootstrap server has not answered yet")?;
        let mut headers = self.headers.clone();
        let (for_prefill, change) = match meeting {
            Meeting::Sglang(fields) => {
                let change = Change::After(fields.into());
                let stage = StageRequest {
                    role: Role::Prefill,
                    change: change.clone(),
                };
                (stage, change)
            }
            Meeting::Mooncake {
                fields: [ask, answer],
                rank,
            } => {
                if let Some(rank) = rank {
                    let mut lines = BytesMut::from(&headers[..]);
                    let rank = rank.to_string();
                    wire::write_header(&mut lines, X_DATA_PARALLEL_RANK, rank.as_bytes());
                    headers = lines.freeze();
                }
                let stage = self.prefill_request(shard, Some(ask)).await;
                let stage = stage.ok_or("the request could not be rewritten")?;
                (stage, Change::Before(answer.into()))
            }
        };
        let body = self.body_for(prefill, &for_prefill);
        if matches!(for_prefill.change, Change::Body(_)) && !self.keep_sent(body[0].len()) {
            return Err("there is no memory for a second body".into());
        }
        let request = PrefillRequest {
            method: self.method.clone(),
            target: self.target.clone(),
            headers,
            authorization: self.authorization.clone(),
            body,
        };
        let stage = StageRequest {
            role: Role::Decode,
            change,
        };
        Ok((request, stage))
    }
}

/// A request as one engine gets it.
pub(super) struct Outgoing<'a> {
    pub(super) method: &'a Method,
    /// Path and query.
    pub(super) target: &'a str,
    /// Header lines.
    pub(super) headers: Bytes,
    /// For an engine without a key of its own.
    pub(super) authorization: Option<&'a [u8]>,
    pub(super) body: [Bytes; 2],
    /// Whether an engine may get it twice.
    pub(super) repeats: bool,
    /// Whether its client wants what keeps its connection open, before the answer.
    pub(super) streams: bool,
    /// By which the end of the answer is known.
    pub(super) api: Api,
}

/// A request that outlives the client's one.
#[derive(Debug)]
pub(super) struct PrefillRequest {
    pub(super) method: Method,
    pub(super) target: String,
    pub(super) headers: Bytes,
    pub(super) authorization: Option<Bytes>,
    pub(super) body: [Bytes; 2],
}

/// A place among the open streams of the server.
pub(super) struct StreamPermit(RefCell<Option<PermitState>>);

struct PermitState {
    shard: Rc<Shard>,
    client: Client,
    /// Memory of its body, and of the sent part of its answer.
    charge: RefCell<Charge>,
}

impl StreamPermit {
    pub(super) fn take(
        shard: &Rc<Shard>,
        client: Client,
        charge: Charge,
    ) -> Result<StreamPermit, ApiError> {
        shard
            .open_streams(&client, 1)
            .inspect_err(|_| shard.metrics.on_rejected(Rejection::StreamsMax))?;
        Ok(StreamPermit(RefCell::new(Some(PermitState {
            shard: shard.clone(),
            client,
            charge: RefCell::new(charge),
        }))))
    }

    /// Charges `bytes` in all.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    fn grow_to(&self, bytes: usize) -> Result<(), ApiError> {
        match &*self.0.borrow() {
            Some(held) => held.charge.borrow_mut().grow_to(bytes as u64),
            None => Ok(()),
        }
    }

    /// For a request that continues one with a place.
    pub(super) fn shared() -> StreamPermit {
        StreamPermit(RefCell::new(None))
    }
}

impl Drop for PermitState {
    fn drop(&mut self) {
        self.shard.on_streams_closed(&self.client, 1);
    }
}
