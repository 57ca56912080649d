//! Requests drawn from a workload's classes.

use slipstream_base::mix::mix64;
use slipstream_base::width;
use slipstream_base::{RequestId, SimTime, adapter_id};
use slipstream_config::workload_file::{
    Arrival, Class, Dist, IMAGE_TOKENS_MAX, IMAGES_MAX, Workload,
};

use crate::draw::{Stream, Table};
use crate::error::SourceError;
use crate::prompt::{Content, PromptSource, Role, Segment};
use crate::request::{Images, Request, TURNS_MAX};

/// Start times of sessions, one after the other.
#[derive(Debug)]
pub(crate) struct Arrivals {
    arrival: Arrival,
    gaps: Stream,
    index: u64,
    /// Start of the last session, s of workload time.
    at_s: f64,
    /// Expected number of sessions until the last one, if the rate changes. Arrivals at rate r(t)
    /// are those at rate 1 on the clock ∫r.
    expected: f64,
    time_scale: f64,
    duration_s: f64,
}

impl Arrivals {
    pub(crate) fn new(workload: &Workload, salt: u64) -> Arrivals {
        Arrivals {
            arrival: workload.arrival.clone(),
            gaps: Stream::named(workload.seed ^ salt, "arrival"),
            index: 0,
            at_s: 0.0,
            expected: 0.0,
            time_scale: workload.time_scale,
            duration_s: workload.duration_s.unwrap_or(f64::INFINITY),
        }
    }

    /// The next session's arrival; `None` when there are no more. `trace_ms` is the trace's time,
    /// for a workload that follows its trace. In a closed loop all are due at once.
    pub(crate) fn next(&mut self, trace_ms: Option<f64>) -> Option<SimTime> {
        let index = self.index;
        self.index += 1;
        self.at_s = match &self.arrival {
            Arrival::Closed { .. } => 0.0,
            Arrival::Constant { rate_per_s } => index as f64 / rate_per_s,
            Arrival::Poisson { rate_per_s } => {
                self.at_s + self.gaps.child(index).exponential() / rate_per_s
            }
            Arrival::Gamma { rate_per_s, cv } => {
                let gap = if *cv > 0.0 {
                    self.gaps.child(index).gamma(1.0 / (cv * cv))
                } else {
                    1.0
                };
                self.at_s + gap / rate_per_s
            }
            Arrival::Weibull { rate_per_s, shape } => {
                self.at_s + self.gaps.child(index).weibull(*shape) / rate_per_s
            }
            Arrival::Ramp {
                from_per_s,
                to_per_s,
                ramp_s,
            } => {
                self.expected += self.gaps.child(index).exponential();
                ramp_time(self.expected, *from_per_s, *to_per_s, *ramp_s)
            }
            Arrival::Diurnal {
                rate_per_s,
                amplitude,
                period_s,
                peak_s,
            } => {
                self.expected += self.gaps.child(index).exponential();
                let wave = Wave {
                    amplitude: *amplitude,
                    period_s: *period_s,
                    peak_s: *peak_s,
                };
                wave.time(self.expected / rate_per_s)
            }
            Arrival::Timestamps { ms } => *ms.get(width::to_usize(index))? / 1e3,
            Arrival::Trace => trace_ms? / 1e3,
        };
        (self.at_s < self.duration_s).then(|| SimTime::from_secs_f64(self.at_s / self.time_scale))
    }
}

/// The time at which `expected` sessions are reached, at a rate that changes from `from` to `to`
/// (1/s) in `ramp_s`.
fn ramp_time(expected: f64, from: f64, to: f64, ramp_s: f64) -> f64 {
    let on_ramp = f64::midpoint(from, to) * ramp_s;
    if expected >= on_ramp {
        return ramp_s + (expected - on_ramp) / to;
    }
    // from·t + slope·t²/2 = expected, in the form that stays exact if the slope is 0.
    let slope = (to - from) / ramp_s;
    2.0 * expected / (from + libm::sqrt((from * from + 2.0 * slope * expected).max(0.0)))
}

/// A rate of mean 1 with a periodic wave: `1 + amplitude · cos(2π (t − peak_s) / period_s)`.
struct Wave {
    amplitude: f64,
    period_s: f64,
    peak_s: f64,
}

impl Wave {
    /// Expected number between 0 and `t`.
    fn expected(&self, t: f64) -> f64 {
        let angle = std::f64::consts::TAU / self.period_s;
        let wave = libm::sin(angle * (t - self.peak_s)) + libm::sin(angle * self.peak_s);
        t + self.amplitude / angle * wave
    }

    /// The time at which `expected` is reached. The wave adds at most `amplitude · period / π`;
    /// bisection between those bounds continues to the last bit of a double.
    fn time(&self, expected: f64) -> f64 {
        let most = self.amplitude * self.period_s / std::f64::consts::PI;
        let (mut low, mut high) = ((expected - most).max(0.0), expected + most);
        for _ in 0..80 {
            let middle = f64::midpoint(low, high);
            if middle <= low || middle >= high {
                break;
            }
            if self.expected(middle) < expected {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }
}

/// Requests drawn from classes.
#[derive(Debug)]
pub struct Generator {
    classes: Vec<Class>,
    class_table: Table,
    /// Shape `[classes]`.
    choices: Vec<Choices>,
    arrivals: Arrivals,
    seed: u64,
    time_scale: f64,
    session: u64,
    requests_left: u64,
}

/// Choices that sessions of a class draw from.
#[derive(Debug)]
struct Choices {
    /// Popularity of the branches on each level of the prefix tree.
    branches: Vec<Table>,
    adapters: Vec<u64>,
    /// Their popularity.
    adapter_table: Table,
    /// Places of its models among those that are served; empty: the only one.
    models: Vec<u32>,
    /// Their weights.
    model_table: Table,
}

impl Choices {
    fn of(class: &Class, served: &[String]) -> Result<Choices, SourceError> {
        let place = |name: &String| {
            let at = served.iter().position(|of| of == name);
            at.map(width::to_u32)
                .ok_or_else(|| SourceError::UnknownModel {
                    model: name.clone(),
                    served: served.to_vec(),
                })
        };
        let models: Vec<u32> = if served.is_empty() {
            Vec::new()
        } else {
            class.models.iter().map(place).collect::<Result<_, _>>()?
        };
        if models.is_empty() && served.len() > 1 {
            return Err(SourceError::NoModel {
                class: class.name.clone(),
                served: served.to_vec(),
            });
        }
        let branches = class.prefix.iter().map(|l| Table::zipf(l.branches, l.skew));
        let adapters: Vec<u64> = class.adapters.iter().map(|a| adapter_id(a, a)).collect();
        let count = width::to_u32(adapters.len()).max(1);
        Ok(Choices {
            branches: branches.collect(),
            adapters,
            adapter_table: Table::zipf(count, class.adapter_skew),
            model_table: match models.len() {
                0 | 1 => Table::zipf(1, 0.0),
                _ => Table::new(class.model_weights.iter().copied()),
            },
            models,
        })
    }
}

impl Generator {
    pub(crate) fn new(
        workload: &Workload,
        classes: Vec<Class>,
        salt: u64,
    ) -> Result<Self, SourceError> {
        if workload.arrival == Arrival::Trace {
            return Err(SourceError::NoTrace);
        }
        Ok(Generator {
            class_table: Table::new(classes.iter().map(|c| c.weight)),
            choices: classes
                .iter()
                .map(|class| Choices::of(class, &workload.served_models))
                .collect::<Result<_, _>>()?,
            classes,
            arrivals: Arrivals::new(workload, salt),
            seed: workload.seed ^ salt,
            time_scale: workload.time_scale,
            session: 0,
            requests_left: workload.requests.unwrap_or(u64::MAX),
        })
    }

    fn stream(&self, name: &str) -> Stream {
        Stream::named(self.seed, name)
    }

    /// The shared texts that begin a session's prompts.
    fn prefix(&self, class: usize, session: u64) -> Vec<Segment> {
        let choices = self.stream("prefix").child(session);
        // The path from the root identifies a text: equal paths, equal texts.
        let mut path = self.stream("prefix text").child(class as u64);
        self.classes[class]
            .prefix
            .iter()
            .zip(&self.choices[class].branches)
            .enumerate()
            .map(|(level, (shape, table))| {
                path = path.child(table.index(choices.unit(level as u64)) as u64);
                Segment {
                    content: Content::Text(path.bits(u64::MAX)),
                    tokens: path.child(u64::MAX - 1).sample_whole(&shape.tokens, 1),
                    role: Role::System,
                }
            })
            .collect()
    }

    fn adapter(&self, class: usize, session: u64) -> u64 {
        let choices = &self.choices[class];
        if choices.adapters.is_empty() {
            return 0;
        }
        let draw = self.stream("adapter").child(session).unit(0);
        choices.adapters[choices.adapter_table.index(draw)]
    }

    /// The model of a session, by its place among those that are served.
    fn model(&self, class: usize, session: u64) -> u32 {
        let choices = &self.choices[class];
        match choices.models[..] {
            [] => 0,
            [only] => only,
            _ => {
                let draw = self.stream("model").child(session).unit(0);
                choices.models[choices.model_table.index(draw)]
            }
        }
    }

    /// Images of a session, behind `shared` tokens of its first prompt.
    fn images(&self, class: usize, session: u64, shared: u32) -> Images {
        let shape = &self.classes[class];
        if shape.images == Dist::Exact(0.0) {
            return Images::default();
        }
        let stream = self.stream("images").child(session);
        let tokens = stream.child(1).sample_whole(&shape.image_tokens, 1);
        match stream.sample_whole(&shape.images, 0).min(IMAGES_MAX) {
            0 => Images::default(),
            count => Images {
                count,
                offset: shared,
                tokens: tokens.min(IMAGE_TOKENS_MAX),
            },
        }
    }

    fn output_len(&self, class: usize, session: u64, turn: u32) -> u32 {
        let stream = self.stream("osl").child(session).child(u64::from(turn));
        stream.sample_whole(&self.classes[class].osl, 1)
    }

    fn user_tokens(&self, class: usize, session: u64, turn: u32) -> u32 {
        let stream = self.stream("user").child(session).child(u64::from(turn));
        stream.sample_whole(&self.classes[class].session.user_tokens, 1)
    }

    fn user_text(&self, session: u64, turn: u32, tokens: u32) -> Segment {
        Segment {
            content: Content::Text(mix64(
                self.stream("text").child(session).bits(u64::from(turn)),
            )),
            tokens,
            role: Role::User,
        }
    }

    /// Turns of a session: as drawn, but limited by `isl_max` and by `left` requests.
    fn turns(&self, class: usize, session: u64, first_isl: u32, left: u64) -> u32 {
        let shape = &self.classes[class].session;
        let drawn = self
            .stream("turns")
            .child(session)
            .sample_whole(&shape.turns, 1);
        let most = drawn
            .min(TURNS_MAX)
            .min(u32::try_from(left).unwrap_or(u32::MAX));
        let Some(isl_max) = shape.isl_max else {
            return most;
        };
        let mut isl = u64::from(first_isl);
        let mut turns = 1;
        while turns < most {
            isl += u64::from(self.output_len(class, session, turns - 1));
            isl += u64::from(self.user_tokens(class, session, turns));
            if isl > u64::from(isl_max) {
                break;
            }
            turns += 1;
        }
        turns
    }

    /// Whether sessions may have more than one turn.
    pub(crate) fn may_follow_up(&self) -> bool {
        let turns = |class: &Class| class.session.turns.clone();
        self.classes
            .iter()
            .any(|class| turns(class) != Dist::Exact(1.0))
    }

    pub(crate) fn follow_up(
        &self,
        request: &Request,
        answer_tokens: u32,
        now: SimTime,
    ) -> Option<Request> {
        if !request.has_next() {
            return None;
        }
        let (session, turn, class) = (request.session, request.turn + 1, request.class as usize);
        let think = self.stream("think").child(session).child(u64::from(turn));
        let think_s = think.sample(&self.classes[class].session.think_time_s);
        let answer = Segment {
            content: Content::Answer(request.id()),
            tokens: answer_tokens,
            role: Role::Assistant,
        };
        let user = self.user_text(session, turn, self.user_tokens(class, session, turn));
        Some(Request {
            turn,
            due: now + SimTime::from_secs_f64(think_s / self.time_scale).0,
            prompt: PromptSource::new(
                request
                    .prompt
                    .segments()
                    .iter()
                    .copied()
                    .chain([answer, user]),
            ),
            output_len: self.output_len(class, session, turn),
            ..*request
        })
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        if self.requests_left == 0 {
            return None;
        }
        let session = self.session;
        let due = self.arrivals.next(None)?;
        let class = self
            .class_table
            .index(self.stream("class").child(session).unit(0));
        let mut segments = self.prefix(class, session);
        let shared: u32 = segments.iter().map(|s| s.tokens).sum();
        let isl = self
            .stream("isl")
            .child(session)
            .sample_whole(&self.classes[class].isl, 1);
        // At least one token of a prompt is unique, so that a session differs from its neighbors.
        let images = self.images(class, session, shared);
        let of_images = images.count * images.tokens;
        let own = isl.saturating_sub(shared).max(1).saturating_add(of_images);
        segments.push(self.user_text(session, 0, own));
        let turns = self.turns(class, session, shared + own, self.requests_left);
        self.session += 1;
        self.requests_left -= u64::from(turns);
        Some(Request {
            session,
            turn: 0,
            turns,
            due,
            prompt: PromptSource::new(segments),
            output_len: self.output_len(class, session, 0),
            ignore_eos: self.classes[class].ignore_eos,
            priority: self.classes[class].priority,
            adapter: self.adapter(class, session),
            images,
            model: self.model(class, session),
            class: width::to_u32(class),
        })
    }
}

/// The id of a request, from its session and turn.
pub fn request_id(session: u64, turn: u32) -> RequestId {
    RequestId(session << 12 | u64::from(turn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_config::workload_file::{self, PrefixLevel, SessionShape};
    use std::collections::HashSet;

    fn workload(arrival: Arrival, requests: u64, class: Class) -> Workload {
        Workload {
            seed: 1,
            requests: Some(requests),
            duration_s: None,
            time_scale: 1.0,
            window_s: None,
            served_models: Vec::new(),
            arrival,
            content: workload_file::Content::Generated(vec![class]),
        }
    }

    fn generator(workload: &Workload) -> Generator {
        let workload_file::Content::Generated(classes) = &workload.content else {
            unreachable!("made above")
        };
        Generator::new(workload, classes.clone(), 0).unwrap()
    }

    /// Images are in the first prompt of a session, behind the shared text, and so in all later ones.
    #[test]
    fn images_make_prompts_longer() {
        let class = |images: f64| Class {
            isl: Dist::Exact(300.0),
            images: Dist::Exact(images),
            image_tokens: Dist::Uniform {
                min: 50.0,
                max: 90.0,
            },
            prefix: vec![PrefixLevel {
                branches: 2,
                tokens: Dist::Exact(100.0),
                skew: 0.0,
            }],
            session: SessionShape {
                turns: Dist::Exact(2.0),
                ..SessionShape::default()
            },
            ..Class::default()
        };
        let load = |images| workload(Arrival::Constant { rate_per_s: 1.0 }, 40, class(images));
        let with = generator(&load(3.0));
        let later = |r: &Request| with.follow_up(r, 1, SimTime(0)).unwrap().images;
        let requests: Vec<Request> = generator(&load(3.0)).collect();
        for request in &requests {
            let images = request.images;
            assert_eq!((images.count, images.offset), (3, 100));
            assert!((50..=90).contains(&images.tokens));
            assert_eq!(request.prompt.tokens(), 300 + 3 * images.tokens);
            assert_eq!(later(request), images);
        }
        let sizes: HashSet<u32> = requests.iter().map(|r| r.images.tokens).collect();
        assert!(sizes.len() > 5, "{sizes:?}");
        // Nothing else is drawn from the same numbers.
        for (plain, with) in generator(&load(0.0)).zip(&requests) {
            assert_eq!(plain.images, Images::default());
            assert_eq!((plain.due, plain.output_len), (with.due, with.output_len));
        }
    }

    /// Each session has one adapter for all of its turns; the first of three is drawn as often as Zipf's law says.
    #[test]
    fn sessions_draw_adapters_by_popularity() {
        let class = Class {
            adapters: ["a", "b", "c"].map(str::to_owned).to_vec(),
            adapter_skew: 1.0,
            session: SessionShape {
                turns: Dist::Exact(2.0),
                ..SessionShape::default()
            },
            ..Class::default()
        };
        let generator = generator(&workload(Arrival::Closed { concurrency: 1 }, 12_000, class));
        let later = |r: &Request| generator.follow_up(r, 1, SimTime(0)).unwrap().adapter;
        let sessions: Vec<Request> = self::generator(&workload(
            Arrival::Closed { concurrency: 1 },
            12_000,
            generator.classes[0].clone(),
        ))
        .collect();
        assert!(sessions.iter().all(|r| later(r) == r.adapter));
        let share = |name: &str| {
            let of = sessions
                .iter()
                .filter(|r| r.adapter == adapter_id(name, name));
            of.count() as f64 / sessions.len() as f64
        };
        // 1, 1/2 and 1/3 of 11/6; four standard errors.
        for (name, expected) in [("a", 6.0 / 11.0), ("b", 3.0 / 11.0), ("c", 2.0 / 11.0)] {
            assert!(
                (share(name) - expected).abs() < 0.026,
                "{name}: {}",
                share(name)
            );
        }
        let plain = self::generator(&workload(
            Arrival::Closed { concurrency: 1 },
            10,
            Class::default(),
        ));
        assert!(plain.into_iter().all(|r| r.adapter == 0));
    }

    /// Checks mean and coefficient of variation of the gaps between arrivals. Tolerances as in
    /// `draw`: four standard errors of the mean (cv/√n), 3 % for the cv.
    fn check_gaps(arrival: Arrival, mean_s: f64, cv: f64) {
        let n = 50_000;
        let due: Vec<f64> = generator(&workload(arrival, n, Class::default()))
            .map(|r| r.due.as_secs_f64())
            .collect();
        let gaps: Vec<f64> = due.windows(2).map(|w| w[1] - w[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!(
            (mean / mean_s - 1.0).abs() <= 4.0 * cv / (n as f64).sqrt() + 1e-6,
            "{mean}"
        );
        assert!(
            (variance.sqrt() / mean - cv).abs() <= 0.03 * cv + 1e-6,
            "{}",
            variance.sqrt() / mean
        );
    }

    /// Arrivals in each part of the time must match the rate's integral, within four standard
    /// deviations (the root of a Poisson count).
    fn check_rates(arrival: &Arrival, parts: &[(f64, f64, f64)]) {
        let mut all = workload(arrival.clone(), 0, Class::default());
        (all.requests, all.duration_s) = (None, Some(parts.last().unwrap().1));
        let due: Vec<f64> = generator(&all).map(|r| r.due.as_secs_f64()).collect();
        assert!(due.is_sorted());
        for &(from, to, expected) in parts {
            let count = due.iter().filter(|t| (from..to).contains(*t)).count() as f64;
            assert!(
                (count - expected).abs() <= 4.0 * expected.sqrt(),
                "{count} from {from} to {to} s, not {expected}"
            );
        }
    }

    #[test]
    fn ramps_and_waves_have_the_stated_rates() {
        // 0 to 100/s in 200 s: 50·(t/100)² by t; then 100/s.
        let up = Arrival::Ramp {
            from_per_s: 0.0,
            to_per_s: 100.0,
            ramp_s: 200.0,
        };
        check_rates(
            &up,
            &[
                (0.0, 100.0, 2_500.0),
                (100.0, 200.0, 7_500.0),
                (200.0, 300.0, 10_000.0),
            ],
        );
        let down = Arrival::Ramp {
            from_per_s: 100.0,
            to_per_s: 20.0,
            ramp_s: 100.0,
        };
        check_rates(
            &down,
            &[
                (0.0, 50.0, 4_000.0),
                (50.0, 100.0, 2_000.0),
                (100.0, 200.0, 2_000.0),
            ],
        );
        let flat = Arrival::Ramp {
            from_per_s: 50.0,
            to_per_s: 50.0,
            ramp_s: 10.0,
        };
        check_rates(&flat, &[(0.0, 10.0, 500.0), (10.0, 100.0, 4_500.0)]);
        // 50·(1 + 0.8·cos(2π(t − 50)/100)): a quarter period around the peak or the lowest holds
        // 25 ± 0.8·100·sin(π/4)/π, times 50.
        let wave = Arrival::Diurnal {
            rate_per_s: 50.0,
            amplitude: 0.8,
            period_s: 100.0,
            peak_s: 50.0,
        };
        let more = 0.8 * 100.0 * std::f64::consts::FRAC_PI_4.sin() / std::f64::consts::PI;
        let (high, low) = (50.0 * (25.0 + more), 50.0 * (25.0 - more));
        check_rates(
            &wave,
            &[
                (37.5, 62.5, high),
                (87.5, 112.5, low),
                (137.5, 162.5, high),
                (0.0, 200.0, 10_000.0),
            ],
        );
    }

    #[test]
    fn an_empirical_distribution_repeats_its_file() {
        let mut dist = slipstream_config::workload_file::Empirical {
            path: "unused".into(),
            column: None,
            bounds: slipstream_config::workload_file::Bounds::default(),
            values: [100.0, 100.0, 400.0, 5_000.0].into(),
        };
        dist.bounds.max = 1_000.0;
        let class = Class {
            isl: Dist::Empirical(dist),
            ..Class::default()
        };
        let all = workload(Arrival::Poisson { rate_per_s: 1.0 }, 8_000, class);
        let mut counts = std::collections::BTreeMap::new();
        for request in generator(&all) {
            *counts.entry(request.prompt.tokens()).or_insert(0u32) += 1;
        }
        assert_eq!(
            counts.keys().copied().collect::<Vec<_>>(),
            [100, 400, 1_000]
        );
        // Half and a quarter of 8,000; standard deviations are 45 and 39, four of the larger.
        assert!(
            counts[&100].abs_diff(4_000) < 180 && counts[&400].abs_diff(2_000) < 180,
            "{counts:?}"
        );
    }

    #[test]
    fn arrivals_have_the_stated_rate_and_burstiness() {
        check_gaps(
            Arrival::Weibull {
                rate_per_s: 10.0,
                shape: 2.0,
            },
            0.1,
            // cv² = Γ(2)/Γ(1.5)² − 1 = 4/π − 1
            (4.0 / std::f64::consts::PI - 1.0).sqrt(),
        );
        check_gaps(Arrival::Constant { rate_per_s: 8.0 }, 0.125, 0.0);
        check_gaps(Arrival::Poisson { rate_per_s: 10.0 }, 0.1, 1.0);
        check_gaps(
            Arrival::Gamma {
                rate_per_s: 10.0,
                cv: 2.0,
            },
            0.1,
            2.0,
        );
        check_gaps(
            Arrival::Gamma {
                rate_per_s: 10.0,
                cv: 0.5,
            },
            0.1,
            0.5,
        );
    }

    #[test]
    fn duration_and_time_scale() {
        let mut w = workload(
            Arrival::Constant { rate_per_s: 1.0 },
            1_000,
            Class::default(),
        );
        w.duration_s = Some(60.0);
        w.time_scale = 60.0;
        let due: Vec<_> = generator(&w).map(|r| r.due).collect();
        assert_eq!(due.len(), 60);
        assert!(due[59] < SimTime::from_secs_f64(1.0));
        assert_eq!(due[30], SimTime::from_secs_f64(0.5));
    }

    #[test]
    fn a_number_of_requests_counts_all_turns() {
        let class = Class {
            session: SessionShape {
                turns: Dist::Exact(4.0),
                ..SessionShape::default()
            },
            ..Class::default()
        };
        let w = workload(Arrival::Closed { concurrency: 2 }, 10, class);
        let turns: Vec<u32> = generator(&w).map(|r| r.turns).collect();
        assert_eq!(turns, [4, 4, 2]);
    }

    #[test]
    fn a_session_grows_by_answer_and_user_text() {
        let class = Class {
            isl: Dist::Exact(100.0),
            osl: Dist::Exact(20.0),
            session: SessionShape {
                turns: Dist::Exact(3.0),
                think_time_s: Dist::Exact(2.0),
                user_tokens: Dist::Exact(30.0),
                isl_max: None,
            },
            ..Class::default()
        };
        let mut g = generator(&workload(Arrival::Closed { concurrency: 1 }, 3, class));
        let first = g.next().unwrap();
        let second = g.follow_up(&first, 20, SimTime(5)).unwrap();
        let third = g.follow_up(&second, 7, SimTime(9)).unwrap();
        assert_eq!(g.follow_up(&third, 20, SimTime(0)), None);
        let isl = [&first, &second, &third].map(|r| r.prompt.tokens());
        assert_eq!(isl, [100, 150, 187]);
        assert_eq!(second.due, SimTime(5) + 2_000_000_000);
        // Each prompt begins with the previous one.
        assert_eq!(second.prompt.segments()[..1], *first.prompt.segments());
        assert_eq!(third.prompt.segments()[..3], *second.prompt.segments());
        assert_eq!(
            second.prompt.segments()[1].content,
            Content::Answer(first.id())
        );
        assert_eq!(
            (third.id(), third.name()),
            (request_id(0, 2), "0.2".to_owned())
        );
    }

    #[test]
    fn isl_max_ends_sessions_early() {
        let class = Class {
            isl: Dist::Exact(100.0),
            osl: Dist::Exact(20.0),
            session: SessionShape {
                turns: Dist::Exact(50.0),
                user_tokens: Dist::Exact(30.0),
                isl_max: Some(200),
                ..SessionShape::default()
            },
            ..Class::default()
        };
        let mut g = generator(&workload(Arrival::Closed { concurrency: 1 }, 100, class));
        assert_eq!(g.next().unwrap().turns, 3); // 100, 150, 200
    }

    #[test]
    fn prefix_tree_shares_what_its_shape_says() {
        let level = |branches, tokens| PrefixLevel {
            branches,
            tokens: Dist::Exact(tokens),
            skew: 0.0,
        };
        let class = Class {
            isl: Dist::Exact(1_000.0),
            prefix: vec![level(3, 256.0), level(2, 128.0)],
            ..Class::default()
        };
        let requests: Vec<_> =
            generator(&workload(Arrival::Closed { concurrency: 1 }, 200, class)).collect();
        let texts = |n: usize| -> HashSet<Vec<Segment>> {
            requests
                .iter()
                .map(|r| r.prompt.segments()[..n].to_vec())
                .collect()
        };
        assert_eq!(
            [texts(1).len(), texts(2).len(), texts(3).len()],
            [3, 6, 200]
        );
        assert!(requests.iter().all(|r| r.prompt.tokens() == 1_000));
    }

    #[test]
    fn a_prompt_has_a_token_of_its_own_beyond_a_long_prefix() {
        let class = Class {
            isl: Dist::Exact(10.0),
            prefix: vec![PrefixLevel {
                branches: 1,
                tokens: Dist::Exact(64.0),
                skew: 0.0,
            }],
            ..Class::default()
        };
        let r = generator(&workload(Arrival::Closed { concurrency: 1 }, 1, class))
            .next()
            .unwrap();
        assert_eq!(r.prompt.tokens(), 65);
    }

    #[test]
    fn changing_one_key_leaves_the_other_draws_alone() {
        let lengths = |osl| {
            let class = Class {
                isl: Dist::Uniform {
                    min: 10.0,
                    max: 1_000.0,
                },
                osl,
                ..Class::default()
            };
            generator(&workload(Arrival::Poisson { rate_per_s: 5.0 }, 50, class))
                .map(|r| (r.due, r.prompt.clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            lengths(Dist::Exact(1.0)),
            lengths(Dist::Uniform { min: 1.0, max: 9.0 })
        );
    }

    #[test]
    fn a_salt_changes_texts_but_not_lengths_kind() {
        let w = workload(Arrival::Closed { concurrency: 1 }, 1, Class::default());
        let workload_file::Content::Generated(classes) = &w.content else {
            unreachable!()
        };
        let salted = Generator::new(&w, classes.clone(), 9)
            .unwrap()
            .next()
            .unwrap();
        let plain = generator(&w).next().unwrap();
        assert_eq!(salted.prompt.tokens(), plain.prompt.tokens());
        assert_ne!(salted.prompt, plain.prompt);
    }
}
