//! Forward-pass metrics on the wire: a MessagePack map, schema version 1.
//!
//! ```text
//! {version, worker_id, dp_rank, counter_id, wall_time,
//!  scheduled_requests: {num_prefill_requests, sum_prefill_tokens, var_prefill_length,
//!                       sum_prefill_kv_tokens, num_decode_requests, sum_decode_kv_tokens,
//!                       var_decode_kv_tokens},
//!  queued_requests:    {… the same without sum_prefill_kv_tokens}}
//! ```
//!
//! Names, types and order are those that planners for Dynamo and vLLM read (Dynamo 1.6,
//! `ForwardPassMetrics`). There are two writers: [`FpmMessage`] owns its fields and is serialized
//! into a new buffer; [`write_fpm`] borrows them and appends to a reused buffer. Both give the same
//! bytes.

use serde::{Deserialize, Serialize};
use slipstream_base::ForwardPassMetrics;

use crate::msgpack::{self, DecodeError, Reader};

/// Version of the schema.
pub const FPM_VERSION: u32 = 1;

/// A record, with fields named as on the wire.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FpmMessage {
    /// Version of the schema: [`FPM_VERSION`].
    pub version: u32,
    /// The worker, such as `w0`.
    pub worker_id: String,
    /// Rank in the worker.
    pub dp_rank: u16,
    /// Number among the rank's records, from 0; a gap means dropped records.
    pub counter_id: u64,
    /// Time of the pass, s; 0 in an idle heartbeat.
    pub wall_time: f64,
    /// Work of the pass.
    pub scheduled_requests: ScheduledRequests,
    /// The queues.
    pub queued_requests: QueuedRequests,
}

/// Work of a pass. Counts, tokens, and population variances of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // documented at `ForwardPassMetrics`
pub struct ScheduledRequests {
    pub num_prefill_requests: u32,
    pub sum_prefill_tokens: u64,
    pub var_prefill_length: f64,
    pub sum_prefill_kv_tokens: u64,
    pub num_decode_requests: u32,
    pub sum_decode_kv_tokens: u64,
    pub var_decode_kv_tokens: f64,
}

/// Queued requests. Units as in [`ScheduledRequests`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct QueuedRequests {
    pub num_prefill_requests: u32,
    pub sum_prefill_tokens: u64,
    pub var_prefill_length: f64,
    pub num_decode_requests: u32,
    pub sum_decode_kv_tokens: u64,
    pub var_decode_kv_tokens: f64,
}

impl FpmMessage {
    /// The record `fpm` of the worker named `worker_id`.
    pub fn new(worker_id: &str, fpm: &ForwardPassMetrics) -> FpmMessage {
        FpmMessage {
            version: FPM_VERSION,
            worker_id: worker_id.to_owned(),
            dp_rank: fpm.rank.dp_rank,
            counter_id: fpm.counter,
            wall_time: fpm.wall_time_s,
            scheduled_requests: ScheduledRequests {
                num_prefill_requests: fpm.scheduled_prefill.requests,
                sum_prefill_tokens: fpm.scheduled_prefill.tokens,
                var_prefill_length: fpm.scheduled_prefill.length_variance,
                sum_prefill_kv_tokens: fpm.scheduled_prefill_kv_tokens,
                num_decode_requests: fpm.scheduled_decode.requests,
                sum_decode_kv_tokens: fpm.scheduled_decode.kv_tokens,
                var_decode_kv_tokens: fpm.scheduled_decode.kv_tokens_variance,
            },
            queued_requests: QueuedRequests {
                num_prefill_requests: fpm.queued_prefill.requests,
                sum_prefill_tokens: fpm.queued_prefill.tokens,
                var_prefill_length: fpm.queued_prefill.length_variance,
                num_decode_requests: fpm.queued_decode.requests,
                sum_decode_kv_tokens: fpm.queued_decode.kv_tokens,
                var_decode_kv_tokens: fpm.queued_decode.kv_tokens_variance,
            },
        }
    }

    /// Serialized into a new buffer.
    pub fn to_vec(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("numbers and strings in memory always serialize")
    }

    /// Reads a record. Fields may be in any order; missing ones are zero, unknown ones are skipped,
    /// as in `msgspec`.
    ///
    /// # Errors
    /// [`DecodeError`]: the error and its byte offset.
    pub fn decode(bytes: &[u8]) -> Result<FpmMessage, DecodeError> {
        let mut reader = Reader::new(bytes);
        let mut fpm = FpmMessage::default();
        for _ in 0..reader.map("a map of forward-pass metrics")? {
            match reader.str("a field's name")? {
                "version" => {
                    let at = reader.at();
                    fpm.version = reader.u32("version")?;
                    if fpm.version != FPM_VERSION {
                        let message = format!(
                            "schema version {} is not supported; expected {FPM_VERSION}",
                            fpm.version
                        );
                        return Err(Reader::value_error(at, message));
                    }
                }
                "worker_id" => reader.str("worker_id")?.clone_into(&mut fpm.worker_id),
                "dp_rank" => {
                    let at = reader.at();
                    fpm.dp_rank = u16::try_from(reader.uint("dp_rank")?)
                        .map_err(|_| Reader::value_error(at, "dp_rank is above 65,535"))?;
                }
                "counter_id" => fpm.counter_id = reader.uint("counter_id")?,
                "wall_time" => fpm.wall_time = reader.float("wall_time")?,
                "scheduled_requests" => fpm.scheduled_requests = read_scheduled(&mut reader)?,
                "queued_requests" => {
                    let all = read_scheduled(&mut reader)?;
                    fpm.queued_requests = QueuedRequests {
                        num_prefill_requests: all.num_prefill_requests,
                        sum_prefill_tokens: all.sum_prefill_tokens,
                        var_prefill_length: all.var_prefill_length,
                        num_decode_requests: all.num_decode_requests,
                        sum_decode_kv_tokens: all.sum_decode_kv_tokens,
                        var_decode_kv_tokens: all.var_decode_kv_tokens,
                    };
                }
                _ => reader.skip("an unknown field")?,
            }
        }
        reader.end()?;
        Ok(fpm)
    }
}

fn read_scheduled(reader: &mut Reader<'_>) -> Result<ScheduledRequests, DecodeError> {
    let mut s = ScheduledRequests::default();
    for _ in 0..reader.map("a map of request metrics")? {
        match reader.str("a field's name")? {
            "num_prefill_requests" => {
                s.num_prefill_requests = reader.u32("num_prefill_requests")?;
            }
            "sum_prefill_tokens" => s.sum_prefill_tokens = reader.uint("sum_prefill_tokens")?,
            "var_prefill_length" => s.var_prefill_length = reader.float("var_prefill_length")?,
            "sum_prefill_kv_tokens" => {
                s.sum_prefill_kv_tokens = reader.uint("sum_prefill_kv_tokens")?;
            }
            "num_decode_requests" => s.num_decode_requests = reader.u32("num_decode_requests")?,
            "sum_decode_kv_tokens" => {
                s.sum_decode_kv_tokens = reader.uint("sum_decode_kv_tokens")?;
            }
            "var_decode_kv_tokens" => {
                s.var_decode_kv_tokens = reader.float("var_decode_kv_tokens")?;
            }
            _ => reader.skip("an unknown field")?,
        }
    }
    Ok(s)
}

/// Appends the record `fpm` of the worker named `worker_id` to `out`: the same bytes as
/// [`FpmMessage::to_vec`], without intermediate copies.
pub fn write_fpm(out: &mut Vec<u8>, worker_id: &str, fpm: &ForwardPassMetrics) {
    use msgpack::{float, map, string, uint};
    // The upper bound of all fields and names, so the pushes below do not grow the buffer.
    out.reserve(640 + worker_id.len());
    map(out, 7);
    string(out, "version");
    uint(out, FPM_VERSION.into());
    string(out, "worker_id");
    string(out, worker_id);
    string(out, "dp_rank");
    uint(out, fpm.rank.dp_rank.into());
    string(out, "counter_id");
    uint(out, fpm.counter);
    string(out, "wall_time");
    float(out, fpm.wall_time_s);

    string(out, "scheduled_requests");
    map(out, 7);
    string(out, "num_prefill_requests");
    uint(out, fpm.scheduled_prefill.requests.into());
    string(out, "sum_prefill_tokens");
    uint(out, fpm.scheduled_prefill.tokens);
    string(out, "var_prefill_length");
    float(out, fpm.scheduled_prefill.length_variance);
    string(out, "sum_prefill_kv_tokens");
    uint(out, fpm.scheduled_prefill_kv_tokens);
    string(out, "num_decode_requests");
    uint(out, fpm.scheduled_decode.requests.into());
    string(out, "sum_decode_kv_tokens");
    uint(out, fpm.scheduled_decode.kv_tokens);
    string(out, "var_decode_kv_tokens");
    float(out, fpm.scheduled_decode.kv_tokens_variance);

    string(out, "queued_requests");
    map(out, 6);
    string(out, "num_prefill_requests");
    uint(out, fpm.queued_prefill.requests.into());
    string(out, "sum_prefill_tokens");
    uint(out, fpm.queued_prefill.tokens);
    string(out, "var_prefill_length");
    float(out, fpm.queued_prefill.length_variance);
    string(out, "num_decode_requests");
    uint(out, fpm.queued_decode.requests.into());
    string(out, "sum_decode_kv_tokens");
    uint(out, fpm.queued_decode.kv_tokens);
    string(out, "var_decode_kv_tokens");
    float(out, fpm.queued_decode.kv_tokens_variance);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_base::fpm::{DecodeStats, PrefillStats};
    use slipstream_base::{RankId, WorkerId};

    use super::*;

    fn prefill() -> impl Strategy<Value = PrefillStats> {
        (any::<u32>(), any::<u64>(), 0.0..1e12).prop_map(|(requests, tokens, length_variance)| {
            PrefillStats {
                requests,
                tokens,
                length_variance,
            }
        })
    }

    fn decode() -> impl Strategy<Value = DecodeStats> {
        (0..300u32, 0..1u64 << 40, 0.0..1e9).prop_map(
            |(requests, kv_tokens, kv_tokens_variance)| DecodeStats {
                requests,
                kv_tokens,
                kv_tokens_variance,
            },
        )
    }

    fn record() -> impl Strategy<Value = ForwardPassMetrics> {
        let rank = (any::<u32>(), any::<u16>()).prop_map(|(worker, dp_rank)| RankId {
            worker: WorkerId(worker),
            dp_rank,
        });
        let rest = (any::<u64>(), 0.0..100.0, any::<u64>());
        (rank, rest, prefill(), decode(), prefill(), decode()).prop_map(
            |(rank, (counter, wall_time_s, kv), sp, sd, qp, qd)| ForwardPassMetrics {
                rank,
                counter,
                wall_time_s,
                scheduled_prefill: sp,
                scheduled_prefill_kv_tokens: kv,
                scheduled_decode: sd,
                queued_prefill: qp,
                queued_decode: qd,
            },
        )
    }

    proptest! {
        #[test]
        fn both_forms_give_the_same_bytes_and_are_read_back(
            fpm in record(), worker in "[a-z0-9-]{0,40}",
        ) {
            let owned = FpmMessage::new(&worker, &fpm);
            let mut borrowed = b"before".to_vec();
            write_fpm(&mut borrowed, &worker, &fpm);
            prop_assert_eq!(&borrowed[6..], &owned.to_vec()[..]);
            prop_assert_eq!(FpmMessage::decode(&borrowed[6..]).unwrap(), owned);
        }

        #[test]
        fn a_record_cut_anywhere_is_refused(fpm in record(), cut in 0.0..1.0f64) {
            let whole = FpmMessage::new("w0", &fpm).to_vec();
            let cut = (whole.len() as f64 * cut) as usize;
            prop_assert!(FpmMessage::decode(&whole[..cut]).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = FpmMessage::decode(&bytes);
        }

        #[test]
        fn changed_bytes_never_panic(fpm in record(), at in any::<usize>(), to in any::<u8>()) {
            let mut bytes = FpmMessage::new("w0", &fpm).to_vec();
            let at = at % bytes.len();
            bytes[at] = to;
            let _ = FpmMessage::decode(&bytes);
        }
    }

    #[test]
    fn a_record_of_another_version_is_refused() {
        let mut bytes = FpmMessage::new("w0", &ForwardPassMetrics::default()).to_vec();
        assert_eq!(bytes[9], 1, "the version is the first field");
        bytes[9] = 2;
        let error = FpmMessage::decode(&bytes).unwrap_err();
        assert_eq!(
            error.to_string(),
            "byte 9: schema version 2 is not supported; expected 1"
        );
    }

    #[test]
    fn a_complaint_names_the_byte() {
        let error = FpmMessage::decode(&[0x81, 0xa7, b'v', b'e']).unwrap_err();
        let what = "a field's name";
        assert_eq!(error, DecodeError::Truncated { at: 2, what });
        let error = FpmMessage::decode(&[0xc0]).unwrap_err();
        assert!(error.to_string().starts_with("byte 0: a map"), "{error}");
    }
}
