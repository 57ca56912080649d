//! How far an answer is, and how far one of its sequences: each in one of the states that it can be in.

use slipstream_base::FinishReason;

use crate::openai::ApiError;

/// How far an answer is.
pub(super) enum Progress {
    /// No event is rendered. A whole answer waits like this for all of its tokens. A stream waits for its first, with
    /// which all choices open: a client that times the first event measures the prompt's computation, as with vLLM.
    Waiting,
    /// The events that open the choices of a stream are rendered.
    Open,
    /// All events of the stream, `[DONE]` included, are rendered; the client may not have read them.
    Complete {
        /// Its time is over: the shard looks after it no longer.
        is_given_up: bool,
    },
    /// A whole answer is being rendered, and does not change.
    Rendering,
    /// The client's side has taken all of it.
    Delivered,
    /// Nothing is added to it any more.
    Failed(Failure),
}

/// An answer that cannot be completed.
pub(super) struct Failure {
    /// What to answer instead, if nothing of it is sent yet.
    pub(super) error: ApiError,
    pub(super) kind: FailureKind,
    /// The client's side has taken what there is, with the error.
    pub(super) is_delivered: bool,
}

/// Why an answer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// The workers, the memory or the server's end.
    Broken,
    /// No worker took it: it never became a response.
    Rejected,
    /// It was ended from outside; nothing more is rendered.
    Cut,
    /// The same, while a whole answer was sent.
    CutInRendering,
}

impl Progress {
    /// Whether nothing is to be added to it any more.
    #[inline]
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Progress::Waiting | Progress::Open | Progress::Rendering => false,
            Progress::Complete { .. } | Progress::Delivered | Progress::Failed(_) => true,
        }
    }

    /// Whether the client's side has taken all that there is.
    pub(super) fn is_delivered(&self) -> bool {
        match self {
            Progress::Delivered => true,
            Progress::Failed(failure) => failure.is_delivered,
            _ => false,
        }
    }

    /// Whether it was ended from outside.
    pub(super) fn is_cut(&self) -> bool {
        match self {
            Progress::Complete { is_given_up } => *is_given_up,
            Progress::Failed(failure) => {
                matches!(failure.kind, FailureKind::Cut | FailureKind::CutInRendering)
            }
            _ => false,
        }
    }

    /// Why it failed, if it did.
    pub(super) fn error(&self) -> Option<&ApiError> {
        match self {
            Progress::Failed(failure) => Some(&failure.error),
            _ => None,
        }
    }

    /// No worker took it.
    pub(super) fn is_rejected(&self) -> bool {
        matches!(self, Progress::Failed(failure) if failure.kind == FailureKind::Rejected)
    }

    /// Fails it, unless nothing is to be added to it any more. Returns whether it does.
    pub(super) fn fail(&mut self, error: &ApiError, kind: FailureKind) -> bool {
        if self.is_complete() {
            return false;
        }
        *self = Progress::Failed(Failure {
            error: error.clone(),
            kind,
            is_delivered: false,
        });
        true
    }

    /// Ends it from outside, if that was not done before. A stream keeps the error that it has; a whole answer, of
    /// which nothing is sent yet, gets this one.
    pub(super) fn cut(&mut self, error: &ApiError, is_stream: bool) {
        match self {
            Progress::Waiting | Progress::Open => {
                self.fail(error, FailureKind::Cut);
            }
            Progress::Rendering => {
                self.fail(error, FailureKind::CutInRendering);
            }
            Progress::Complete { is_given_up } => *is_given_up = true,
            Progress::Failed(failure) => {
                failure.kind = FailureKind::Cut;
                if !is_stream {
                    failure.error = error.clone();
                }
            }
            Progress::Delivered => {}
        }
    }

    /// The client's side has taken all that there is.
    pub(super) fn deliver(&mut self) {
        match self {
            Progress::Failed(failure) => failure.is_delivered = true,
            _ => *self = Progress::Delivered,
        }
    }
}

/// Why a sequence has no more tokens.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    Engine(FinishReason),
    StopString(String),
}

/// How far a sequence is.
pub(super) enum Life {
    /// Tokens come.
    Running,
    /// All its tokens are here, or it was given up.
    Ended(Ending),
    /// The same, and the event with the reason is rendered.
    Closed(Ending),
    /// No engine took it.
    Refused,
}

impl Life {
    #[inline]
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Life::Running)
    }

    /// Why it ended; `None`: it runs, or no engine took it.
    pub(super) fn ending(&self) -> Option<&Ending> {
        match self {
            Life::Ended(ending) | Life::Closed(ending) => Some(ending),
            Life::Running | Life::Refused => None,
        }
    }

    /// Whether its engine ended it, or never began.
    pub(super) fn is_ended_by_engine(&self) -> bool {
        matches!(
            self,
            Life::Refused | Life::Ended(Ending::Engine(_)) | Life::Closed(Ending::Engine(_))
        )
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Life::Refused)
    }

    /// The event with the reason is rendered.
    pub(super) fn close(&mut self) {
        if let Life::Ended(ending) = std::mem::replace(self, Life::Running) {
            *self = Life::Closed(ending);
        }
    }

    /// Gives it up.
    pub(super) fn abort(&mut self) {
        *self = Life::Ended(Ending::Engine(FinishReason::Abort));
    }
}
