//! One choice of an answer: its tokens become events, or the text of a whole answer.

use std::collections::VecDeque;
use std::rc::Rc;

use bytes::BytesMut;
use slipstream_base::width::{low_u32, to_u32};
use slipstream_base::{FinishReason, RankId, TokenId};

use crate::openai::{CallDelta, Finish, LogprobsPiece, SseRender, TokenLogprob, Usage};
use crate::text::{Detokenizer, TextModel};
use crate::tokens::reply::credit::Credit;
use crate::tokens::reply::outlet::make_room;
use crate::tokens::reply::progress::{Ending, Life};
use crate::tokens::reply::spec::{SequenceSpec, Shape};
use crate::tokens::script::{Script, ScriptedCall, Show, call_id};

pub(super) struct Sequence {
    pub(super) spec: SequenceSpec,
    /// Which choice it is, and the answer's id: ids of calls are made of them.
    pub(super) index: usize,
    pub(super) answer_id: Rc<str>,
    /// The worker that computed its prompt, if not the worker that generates.
    pub(super) prefilled: Option<RankId>,
    pub(super) credit: Credit,
    pub(super) render: SseRender,
    pub(super) detok: Detokenizer,
    /// Tokens that wait (streams): for the client to read, and those of the last step for the sequence's
    /// end, with which they share an event.
    pub(super) held: VecDeque<TokenId>,
    /// Of the tokens in `held`, those that share an event: the position of the first of them, and how many
    /// there are. Runs of one are not listed.
    pub(super) held_runs: VecDeque<(u64, u32)>,
    /// Text of the step that completed a stop string, for the event with the reason.
    pub(super) stopped: Option<Piece>,
    /// The answer so far (whole answers).
    pub(super) text: String,
    /// Positions and numbers of the tokens that have log probabilities (whole answers). They follow from
    /// these, so they are made when they are rendered: they take a hundred times the memory.
    pub(super) logprob_tokens: Vec<(u32, TokenId)>,
    /// Ids of the tokens (whole answers), if the answer has them.
    pub(super) ids: Vec<TokenId>,
    /// Characters of text rendered, for `text_offset`.
    pub(super) text_chars: u64,
    /// Tokens rendered, or consumed by a stop matcher: the position of the next one.
    pub(super) position: u64,
    pub(super) generated: u32,
    /// Tokens that came from workers before the present one.
    pub(super) resumed_at: u32,
    pub(super) cached: u32,
    pub(super) preemptions: u32,
    pub(super) last_token_ns: u64,
    pub(super) last_token: TokenId,
    pub(super) life: Life,
    /// Turns that are answered, and whose events are not rendered: their tokens wait for the client.
    pub(super) turns: VecDeque<(u32, FinishReason)>,
}

/// Text that the tokens of a step add to a streamed answer.
#[derive(Default)]
pub(super) struct Piece {
    shown: String,
    logprobs: Option<LogprobsPiece>,
    /// Parts of calls of tools.
    calls: Vec<CallDelta>,
    /// All tokens are frames of calls: no event is sent for them, as with vLLM.
    hidden: bool,
}

impl Sequence {
    /// Sequence number `index` of the answer that has `shape`, before its first token.
    pub(super) fn new(
        index: usize,
        spec: SequenceSpec,
        shape: &Shape,
        answer_id: Rc<str>,
    ) -> Sequence {
        let mut render = SseRender::new(&shape.head(), to_u32(index));
        if let Some(prompt) = spec.prompt_ids.as_ref().filter(|_| shape.stream) {
            render = render.with_token_ids(prompt.clone());
        }
        if shape.running_usage {
            render = render.with_running_usage(u64::from(spec.prompt_tokens));
        }
        Sequence {
            render,
            index,
            answer_id,
            prefilled: None,
            credit: Credit::UNLIMITED,
            detok: Detokenizer::default(),
            held: VecDeque::new(),
            held_runs: VecDeque::new(),
            stopped: None,
            text: String::new(),
            logprob_tokens: Vec::new(),
            ids: Vec::new(),
            text_chars: 0,
            position: 0,
            generated: 0,
            resumed_at: 0,
            cached: 0,
            preemptions: 0,
            last_token_ns: 0,
            last_token: 0,
            life: Life::Running,
            turns: VecDeque::new(),
            spec,
        }
    }

    /// Renders the event that opens the choice.
    pub(super) fn render_role(&self, out: &mut BytesMut) {
        self.render.role(out);
    }

    /// Renders the event with the counts of the whole answer.
    pub(super) fn render_usage(&mut self, usage: &Usage, out: &mut BytesMut) {
        self.render.usage(usage, out);
    }

    /// A turn is answered with the tokens so far.
    pub(super) fn end_turn(&mut self, reason: FinishReason) {
        self.turns.push_back((self.generated, reason));
    }

    /// Completes the text of a whole answer.
    pub(super) fn finish_text(&mut self) {
        let mut text = std::mem::take(&mut self.text);
        self.take_rest(&mut text);
        self.text = text;
    }

    /// Drops what waits for the client.
    pub(super) fn drop_held(&mut self) {
        self.held.clear();
        self.held_runs.clear();
    }

    /// Drops a whole answer.
    pub(super) fn drop_text(&mut self) {
        self.text = String::new();
        self.logprob_tokens = Vec::new();
        self.ids = Vec::new();
    }

    /// Tokens of the sequence that are with the client.
    #[inline]
    pub(super) fn taken(&self) -> u64 {
        u64::from(self.generated) - self.held.len() as u64
    }

    /// Tokens of the prompt whose log probabilities go before those of the answer: with an echo.
    pub(super) fn echoed_tokens(&self) -> usize {
        let spec = &self.spec;
        if !spec.scores_echo {
            return 0;
        }
        spec.scored_prompt.as_ref().map_or(0, |ids| ids.len())
    }

    /// Log probability of a token of the prompt.
    pub(super) fn prompt_logprob(&self, at: usize, top: u32, text: &TextModel) -> TokenLogprob {
        let ids = self.spec.scored_prompt.as_deref().unwrap_or_default();
        TokenLogprob::of_prompt(text, at as u64, ids[at], top)
    }

    /// The token that the answer has in place of the engine's.
    fn allowed(&self, token: TokenId) -> TokenId {
        match &self.spec.vocab {
            Some(vocab) => vocab.token(token, self.spec.seed, self.position),
            None => token,
        }
    }

    /// Keeps the tokens of a step for later.
    pub(super) fn hold(&mut self, tokens: &[TokenId]) {
        if tokens.len() > 1 {
            let position = self.position + self.held.len() as u64;
            self.held_runs.push_back((position, to_u32(tokens.len())));
        }
        // The caller has cut them to the 32 bits that are left of `max_tokens`.
        self.generated += low_u32(tokens.len() as u64);
        self.held.extend(tokens);
    }

    /// Whether no more tokens wait than those of the last step.
    #[inline]
    pub(super) fn holds_last_step(&self) -> bool {
        self.held.len() <= 1
            || matches!(self.held_runs.front(), Some(&(at, run))
                if at == self.position && self.held.len() == run as usize)
    }

    /// Renders the first step of those that wait. Returns whether it completed a stop string.
    pub(super) fn take_held(&mut self, text: &TextModel, out: &mut BytesMut) -> bool {
        let run = self
            .held_runs
            .front()
            .filter(|(at, _)| *at == self.position);
        let run = run.map(|&(_, run)| run);
        let stopped = match run {
            None => match self.held.pop_front() {
                Some(token) => self.take_streamed(&[token], text, out),
                None => false,
            },
            Some(run) => {
                self.held_runs.pop_front();
                let run = self.held.len().min(run as usize);
                let tokens: Vec<TokenId> = self.held.drain(..run).collect();
                self.take_streamed(&tokens, text, out)
            }
        };
        if stopped {
            self.held.clear();
            self.held_runs.clear();
        }
        stopped
    }

    /// Renders the tokens of a step as an event, also if they show no text. Returns whether they
    /// completed a stop string; their event is then the one with the reason.
    #[inline]
    pub(super) fn take_streamed(
        &mut self,
        tokens: &[TokenId],
        text: &TextModel,
        out: &mut BytesMut,
    ) -> bool {
        if let [token] = *tokens
            && self.spec.plain
            && self.detok.is_clean()
            && let Some(json) = text.token_json(token)
        {
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            self.render.escaped(json, out);
            return false;
        }
        self.take_streamed_slowly(tokens, text, out)
    }

    /// As [`take_streamed`](Self::take_streamed): for several tokens, an echo, stop strings, log
    /// probabilities, and tokens that are no whole characters.
    #[cold]
    fn take_streamed_slowly(
        &mut self,
        tokens: &[TokenId],
        text: &TextModel,
        out: &mut BytesMut,
    ) -> bool {
        let (piece, stopped) = self.take_step(tokens, text);
        if stopped {
            self.stopped = Some(piece);
            return true;
        }
        match &piece.logprobs {
            None if piece.hidden => {}
            logprobs if piece.hidden || !piece.calls.is_empty() => {
                self.render
                    .calls(&piece.calls, logprobs.as_ref(), None, out);
            }
            Some(logprobs) => self.render.text_logprobs(&piece.shown, logprobs, out),
            None => self.render.text(&piece.shown, out),
        }
        false
    }

    /// Text that the tokens of a step add, and whether one completed a stop string: those after it count for
    /// nothing.
    fn take_step(&mut self, tokens: &[TokenId], text: &TextModel) -> (Piece, bool) {
        let mut step = Piece {
            hidden: true,
            ..Piece::default()
        };
        for &token in tokens {
            let (piece, stopped) = self.take_piece(token, text);
            step.shown.push_str(&piece.shown);
            step.hidden &= piece.hidden;
            for part in piece.calls {
                match step.calls.last_mut() {
                    Some(last) if last.index == part.index => {
                        last.arguments.push_str(&part.arguments);
                    }
                    _ => step.calls.push(part),
                }
            }
            match (&mut step.logprobs, piece.logprobs) {
                (Some(all), Some(more)) => all.tokens.extend(more.tokens),
                (None, more) => step.logprobs = more,
                (Some(_), None) => {}
            }
            if stopped {
                self.generated = to_u32(self.position);
                return (step, true);
            }
        }
        (step, false)
    }

    /// Text that a generated token adds, and whether it completed a stop string.
    fn take_piece(&mut self, token: TokenId, text: &TextModel) -> (Piece, bool) {
        let token = match self.spec.script.clone() {
            None => {
                let token = self.allowed(token);
                self.render.note_token(token);
                token
            }
            Some(script) => {
                let token = script.token(self.position);
                self.render.note_token(token);
                match script.show(self.position) {
                    (Show::Text, _) => token,
                    show => return (self.take_call(&script, token, show, text), false),
                }
            }
        };
        let mut shown = String::new();
        let mut echoed_logprobs = None;
        if let Some(echo) = self.spec.echo.take() {
            // Those of the echoed prompt go before those of its first token.
            if let Some(top) = self.spec.top_logprobs.filter(|_| self.echoed_tokens() > 0) {
                let tokens = (0..self.echoed_tokens()).map(|at| self.prompt_logprob(at, top, text));
                echoed_logprobs = Some(LogprobsPiece {
                    tokens: tokens.collect(),
                    text_offset: self.text_chars,
                });
            }
            self.text_chars += echo.chars().count() as u64;
            shown.push_str(&echo);
            self.spec.plain = self.spec.shows_each_token();
        }
        if self.spec.echo_only {
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            let piece = Piece {
                shown,
                logprobs: echoed_logprobs,
                ..Piece::default()
            };
            return (piece, false);
        }
        let echoed = shown.len();
        let own = self.logprob(token, text);
        let logprobs = match echoed_logprobs {
            Some(mut all) => {
                all.tokens.extend(own);
                Some(all)
            }
            None => own.map(|token| LogprobsPiece {
                tokens: vec![token],
                text_offset: self.text_chars,
            }),
        };
        let stopped = self.take_text(token, text, &mut shown);
        self.text_chars += shown[echoed..].chars().count() as u64;
        self.render.set_counts(self.position, self.cached.into());
        let piece = Piece {
            shown,
            logprobs,
            ..Piece::default()
        };
        (piece, stopped)
    }

    /// Text that a token of a scripted call adds.
    fn take_call(
        &mut self,
        script: &Script,
        token: TokenId,
        (show, is_last): (Show, bool),
        text: &TextModel,
    ) -> Piece {
        let logprobs = self.logprob(token, text).map(|token| LogprobsPiece {
            tokens: vec![token],
            text_offset: self.text_chars,
        });
        let mut shown = String::new();
        self.detok.push(text, token, &mut shown);
        self.position += 1;
        self.render.set_counts(self.position, self.cached.into());
        let part = match show {
            Show::Call(index) if is_last => Some(CallDelta {
                index,
                begins: Some((
                    call_id(&self.answer_id, self.index, index),
                    script.calls[index as usize].name.clone(),
                )),
                arguments: String::new(),
            }),
            Show::Arguments(index) if !shown.is_empty() => Some(CallDelta {
                index,
                begins: None,
                arguments: shown,
            }),
            _ => None,
        };
        Piece {
            logprobs,
            hidden: part.is_none(),
            calls: part.into_iter().collect(),
            ..Piece::default()
        }
    }

    /// The engine ended at the length that it was given: why the scripted answer ends.
    #[cold]
    pub(super) fn scripted_end(&self, script: &Script, reason: FinishReason) -> FinishReason {
        let is_whole = self.generated >= script.len() && !self.spec.ignores_eos;
        match reason {
            FinishReason::Length if is_whole => FinishReason::Stop,
            reason => reason,
        }
    }

    /// The calls of a whole answer that came to its end; without that end it is text.
    pub(super) fn calls(&self) -> &[ScriptedCall] {
        match (&self.spec.script, self.life.ending()) {
            (Some(script), Some(Ending::Engine(_))) if self.generated >= script.len() => {
                &script.calls
            }
            _ => &[],
        }
    }

    /// Adds one generated token to a whole answer. Returns whether it completed a stop string.
    pub(super) fn take_whole(&mut self, token: TokenId, text: &TextModel) -> bool {
        let mut token = token;
        match &self.spec.script {
            Some(script) => token = script.token(self.position),
            None => token = self.allowed(token),
        }
        if self.spec.prompt_ids.is_some() {
            self.ids.push(token);
        }
        if self.spec.echo_only {
            self.position += 1;
            return false;
        }
        if let Some(script) = &self.spec.script
            && script.show(self.position).0 != Show::Text
        {
            if self.spec.top_logprobs.is_some() && !text.is_special(token) {
                self.logprob_tokens.push((to_u32(self.position), token));
            }
            self.position += 1;
            self.detok.push(text, token, &mut self.text);
            return false;
        }
        if self.spec.top_logprobs.is_some() && !text.is_special(token) {
            self.logprob_tokens.push((to_u32(self.position), token));
        }
        let mut shown = std::mem::take(&mut self.text);
        let stopped = self.take_text(token, text, &mut shown);
        self.text = shown;
        stopped
    }

    /// Log probability of the token at the present position, if asked for; special tokens are not
    /// shown and have none.
    fn logprob(&self, token: TokenId, text: &TextModel) -> Option<TokenLogprob> {
        let top = self.spec.top_logprobs?;
        if text.is_special(token) {
            return None;
        }
        Some(TokenLogprob::modelled(
            text,
            self.spec.seed,
            self.position,
            token,
            top,
        ))
    }

    /// Appends what `token` shows: through the detokenizer, and past the stop strings. Returns
    /// whether it completed one.
    fn take_text(&mut self, token: TokenId, text: &TextModel, shown: &mut String) -> bool {
        self.position += 1;
        let Some(stop) = &mut self.spec.stop else {
            self.detok.push(text, token, shown);
            return false;
        };
        let mut piece = String::new();
        self.detok.push(text, token, &mut piece);
        if self.position < u64::from(self.spec.min_tokens) {
            stop.pass(&piece, shown);
            return false;
        }
        let Some(hit) = stop.push(&piece, shown) else {
            return false;
        };
        let ending = Ending::StopString(self.spec.stops[hit.index].clone());
        self.life = match self.life {
            Life::Closed(_) => Life::Closed(ending),
            _ => Life::Ended(ending),
        };
        true
    }

    /// Text that was held back and is no stop string, and half characters.
    pub(super) fn take_rest(&mut self, shown: &mut String) {
        if matches!(self.life.ending(), Some(Ending::StopString(_))) {
            return;
        }
        let mut piece = String::new();
        self.detok.finish(&mut piece);
        match &mut self.spec.stop {
            Some(stop) => stop.pass(&piece, shown),
            None => shown.push_str(&piece),
        }
    }

    pub(super) fn finish(&self) -> Finish<'_> {
        match self.life.ending() {
            Some(Ending::StopString(stop)) => Finish::StopString(stop),
            Some(Ending::Engine(FinishReason::Stop)) => {
                if let Some(script) = &self.spec.script {
                    return match &script.calls[..] {
                        [_, ..] if !script.named => Finish::ToolCalls,
                        _ => Finish::Stop,
                    };
                }
                if self.spec.stop_token_ids.contains(&self.last_token) {
                    Finish::StopToken(self.last_token)
                } else {
                    Finish::Stop
                }
            }
            Some(Ending::Engine(FinishReason::Length)) => Finish::Length,
            Some(Ending::Engine(FinishReason::Abort)) | None => Finish::Abort,
        }
    }

    /// Renders the ends of turns whose tokens are all rendered.
    #[inline]
    pub(super) fn render_turns(&mut self, out: &mut BytesMut) {
        let rendered = self.generated - low_u32(self.held.len() as u64);
        while let Some(&(at, reason)) = self.turns.front()
            && at <= rendered
        {
            self.turns.pop_front();
            let finish = match reason {
                FinishReason::Stop => Finish::Stop,
                FinishReason::Length => Finish::Length,
                FinishReason::Abort => Finish::Abort,
            };
            let mut rest = String::new();
            self.take_rest(&mut rest);
            let rest = (!rest.is_empty()).then_some(&rest[..]);
            self.render.finish(rest, None, &finish, out);
        }
    }

    /// Renders the event with the reason, and what the last step shows.
    pub(super) fn render_end(&mut self, text: &TextModel, out: &mut BytesMut) {
        self.life.close();
        make_room(out);
        if self.held.len() == 1
            && let Some(&token) = self.held.front()
            && self.spec.plain
            && self.detok.is_clean()
            && let Some(json) = text.token_json(token)
        {
            self.held.clear();
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            self.render.finish_escaped(json, &self.finish(), out);
            return;
        }
        let mut piece = self.stopped.take();
        if !self.held.is_empty() {
            let tokens: Vec<TokenId> = self.held.drain(..).collect();
            self.held_runs.clear();
            piece = Some(self.take_step(&tokens, text).0);
        }
        let mut rest = String::new();
        self.take_rest(&mut rest);
        let (mut shown, logprobs) = match piece {
            Some(piece) if piece.hidden || !piece.calls.is_empty() => {
                let finish = self.finish();
                return self.render.calls(
                    &piece.calls,
                    piece.logprobs.as_ref(),
                    Some(&finish),
                    out,
                );
            }
            Some(piece) => (Some(piece.shown), piece.logprobs),
            None => (None, None),
        };
        if !rest.is_empty() {
            shown.get_or_insert_default().push_str(&rest);
        }
        self.render
            .finish(shown.as_deref(), logprobs.as_ref(), &self.finish(), out);
    }
}
