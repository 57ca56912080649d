//! Work on bodies: on the shard's thread if it is short, else on a helper thread.

use bytes::Bytes;

use crate::door::budget::Charge;
use crate::door::helpers::NoResult;
use crate::door::service::Service;
use crate::door::shard::Shard;
use crate::openai::ApiError;
use crate::text::EncodeCost;

/// Bodies up to these sizes, bytes, are parsed and tokenized on the shard's thread, in a millisecond at most;
/// longer ones by helper threads. A hand-over costs about 20 µs.
const INLINE_BYTES_LOW: usize = 16 << 10;
const INLINE_BYTES_HIGH: usize = 1 << 10;

/// Memory that a byte of a body takes while it is parsed and tokenized, at most, by the cost of tokenizing.
const BODY_FACTOR_LOW: u64 = 32;
const BODY_FACTOR_HIGH: u64 = 512;

impl Shard {
    /// Runs `job` on a body: here if that is short work, else on a helper thread, while the shard serves
    /// others. The charge covers what the job takes, and returns with its result.
    ///
    /// # Errors
    /// The job's; 503 without memory or with too many waiting jobs.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        body: Bytes,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let bytes = body.len();
        self.run_sized(body, bytes, charge, job).await
    }

    /// As [`run`](Self::run), for a job that handles so many `bytes`, at least those of the body.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(crate) async fn run_sized<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let cost = |service: &Service, body: &[u8]| service.text.cost(body);
        self.run_at_cost(body, bytes, charge, cost, job).await
    }

    /// As [`run_sized`](Self::run_sized), for a job that tokenizes nothing.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(crate) async fn run_reading<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        self.run_at_cost(body, bytes, charge, |_, _| EncodeCost::Low, job)
            .await
    }

    async fn run_at_cost<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        mut charge: Charge,
        cost: impl Fn(&Service, &[u8]) -> EncodeCost + Send + 'static,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let service = &self.service;
        let is_short = bytes <= INLINE_BYTES_HIGH
            || bytes <= INLINE_BYTES_LOW && cost(service, &body) == EncodeCost::Low;
        if is_short {
            return Ok((job(service, &body)?, charge));
        }
        let service = service.clone();
        let on_helper = move || {
            let factor = match cost(&service, &body) {
                EncodeCost::Low => BODY_FACTOR_LOW,
                EncodeCost::High => BODY_FACTOR_HIGH,
            };
            let kept = charge.bytes();
            charge.grow_to(kept + factor * bytes as u64)?;
            let done = job(&service, &body)?;
            charge.shrink_to(kept);
            Ok((done, charge))
        };
        match self.helpers.run(bytes, on_helper).await {
            Ok(done) => done,
            Err(NoResult::Busy) => Err(ApiError::overloaded(
                "too many long prompts wait to be tokenized; try again later",
                1,
            )),
            Err(NoResult::Failed) => Err(ApiError::internal("with a long prompt")),
        }
    }
}
