//! Writes Slipstream's own trace format, that of [`own`](crate::own).

use std::io::{self, Write};

use slipstream_base::SimTime;

use crate::own::{SegmentLine, SessionLine, TurnLine};
use crate::prompt::{Content, Segment};
use crate::request::Request;
use crate::source::Source;

/// Writes the session that begins with `first` as a line. `source` generated it; answers count at
/// full length. `scale` is the time scale that due times were divided by.
///
/// Returns the number of turns.
///
/// # Errors
/// If `out` fails.
pub fn write_session(
    out: &mut impl Write,
    source: &Source,
    first: Request,
    scale: f64,
) -> io::Result<u64> {
    let ms = |at: SimTime| at.as_secs_f64() * 1e3 * scale;
    let mut line = SessionLine {
        timestamp: Some(ms(first.due)),
        model: None,
        turns: Vec::new(),
    };
    let mut delay = 0.0;
    let mut before: Option<Vec<Segment>> = None;
    let mut next = Some(first);
    while let Some(request) = next {
        let segments = request.prompt.segments();
        let lines = |segments: &[Segment]| segments.iter().map(SegmentLine::of).collect();
        // The previous prompt and its answer are known when the session is read.
        let kept = before.as_ref().map_or(0, |before| before.len() + 1);
        let goes_on = before.as_ref().is_none_or(|before| {
            segments.starts_with(before)
                && matches!(segments.get(before.len()), Some(s) if matches!(s.content, Content::Answer(_)))
        });
        line.turns.push(TurnLine {
            prompt: (!goes_on).then(|| lines(segments)),
            add: goes_on.then(|| lines(&segments[kept..])),
            output_length: request.output_len,
            delay,
            priority: request.priority,
            ignore_eos: request.ignore_eos,
        });
        next = source.follow_up(&request, request.output_len, SimTime::ZERO);
        delay = next.as_ref().map_or(0.0, |next| ms(next.due));
        before = Some(segments.to_vec());
    }
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")?;
    Ok(line.turns.len() as u64)
}
