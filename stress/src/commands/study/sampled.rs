//! A recorded program under an allocator: what it held over time, and what lay where.

use aquifer_trace::input::Program;
use aquifer_trace::profile::{Buckets, Range};
use aquifer_trace::{Aquifer, Figures, FirstRefusal, Map, Observed, OnOom, Player, PyTorch, Refusal, Refused, Subject};
use serde::Serialize;

use crate::cli::ConfigArg;
use crate::commands::us;
use crate::exit::Failure;
use crate::opened::Opened;
use crate::session::Session;

/// Cells of a row of the map.
const COLUMNS: usize = 1536;
/// Passes after the first.
const LATER_PASSES: u64 = 2;

/// What a program's allocator held over time.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Sampled {
    /// Bytes held from the device.
    pub reserved: Range,
    /// Allocated bytes, after rounding.
    pub allocated: Range,
    /// The most that was held.
    pub peak_reserved: u64,
    /// The numbers of the requests that were refused, from 1.
    pub refused_at: Vec<u64>,
    /// The first of them.
    pub first_refusal: Option<FirstRefusal>,
    /// Driver calls.
    pub calls: u64,
    /// Their modelled time in microseconds; `None` on a real device.
    pub driver_us: Option<f64>,
    /// The same of a later pass, in the mean; `None` also if a request was refused in any pass.
    pub later_us: Option<f64>,
    /// What lay where when most was held.
    pub fullest: Option<Map>,
    /// What lay where at the buckets asked for.
    pub moments: Vec<(usize, Map)>,
}

/// What lay where over time, for the page: see [`Map::row`].
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the page's schema")]
pub struct Space {
    pub cell: u64,
    pub columns: usize,
    pub buckets: Vec<usize>,
    pub rows: Vec<String>,
    pub live: Vec<u64>,
    pub free: Vec<u64>,
    pub largest_free: Vec<u64>,
    pub largest_free_at: Vec<u64>,
    /// Free in segments that are also in use, and the largest piece of that.
    pub stranded: Vec<u64>,
    pub largest_stranded: Vec<u64>,
    pub waiting: Vec<u64>,
    pub parts: Vec<u64>,
}

impl Space {
    /// What lay where at these buckets; `None` if there are none. With `spare`, what is free on the
    /// device follows what is held, as `-`.
    pub fn of(moments: &[(usize, Map)], spare: bool) -> Option<Space> {
        let spare = |map: &Map| if spare { map.free_on_device() } else { 0 };
        let held = |Figures { live, free, waiting, .. }: Figures| live + free + waiting;
        let cell = cell(moments.iter().map(|(_, map)| held(map.figures()) + spare(map)).max()?);
        let each = |of: fn(Figures) -> u64| moments.iter().map(|(_, map)| of(map.figures())).collect();
        let row = |map: &Map| {
            let row = map.row(cell, COLUMNS);
            let taken = row.trim_end_matches('_');
            let spare = usize::try_from(spare(map).div_ceil(cell)).unwrap_or(COLUMNS).min(COLUMNS - taken.len());
            format!("{:_<COLUMNS$}", format!("{taken}{}", "-".repeat(spare)))
        };
        let largest_free_at = |map: &Map| match map.figures() {
            figures if spare(map) > figures.largest_free => held(figures),
            figures => figures.largest_free_at,
        };
        Some(Space {
            cell,
            columns: COLUMNS,
            buckets: moments.iter().map(|&(bucket, _)| bucket).collect(),
            rows: moments.iter().map(|(_, map)| row(map)).collect(),
            live: each(|figures| figures.live),
            free: each(|figures| figures.free),
            largest_free: each(|figures| figures.largest_free),
            largest_free_at: moments.iter().map(|(_, map)| largest_free_at(map)).collect(),
            stranded: moments.iter().map(|(_, map)| map.unused().1.iter().sum()).collect(),
            largest_stranded: moments.iter().map(|(_, map)| map.unused().1.into_iter().max().unwrap_or(0)).collect(),
            waiting: each(|figures| figures.waiting),
            parts: each(|figures| figures.segments),
        })
    }
}

/// The bytes of a cell when a row shows this many.
fn cell(bytes: u64) -> u64 {
    bytes.div_ceil(COLUMNS as u64).next_multiple_of(512).max(512)
}

/// Plays a program under these options on the session's device and samples it. With `moments`,
/// buckets in ascending order, it is played again to take maps: when most is held, and at the
/// events of these buckets.
///
/// # Errors
/// When the device cannot be opened, or the allocator fails for another reason than lack of memory.
pub fn sample(
    session: &Session,
    program: &Program,
    config: &ConfigArg,
    buckets: &Buckets,
    moments: Option<&[usize]>,
) -> Result<Sampled, Failure> {
    match &config.pytorch {
        None => sample_on::<Aquifer>(session, program, config, buckets, moments),
        Some(_) => sample_on::<PyTorch>(session, program, config, buckets, moments),
    }
}

fn sample_on<S: Opened>(
    session: &Session,
    program: &Program,
    config: &ConfigArg,
    buckets: &Buckets,
    moments: Option<&[usize]>,
) -> Result<Sampled, Failure> {
    // What follows the refusal of a program that is too large says nothing.
    let is_too_large = session.sim().is_some_and(|sim| program.peak_requested_bytes > sim.capacity_bytes);
    let on_oom = if is_too_large { OnOom::Stop } else { OnOom::Skip };
    let play = |events: Vec<u64>| {
        let mut observed = S::observed(session, config, program.streams.len(), 0)?;
        let (sampler, costs) = observed.pass(|observed| {
            let mut sampler = Sampler::new(observed, buckets, events, on_oom);
            Player::new(program).pass(&mut sampler, on_oom)?;
            sampler.ended();
            let Sampler { failed, mut samples, .. } = sampler;
            [&mut samples.reserved, &mut samples.allocated].into_iter().for_each(reached);
            failed.map_or(Ok(samples), Err)
        })?;
        Ok::<_, Failure>((sampler, costs, observed))
    };
    let (first, costs, mut observed) = play(Vec::new())?;
    let first_refusal = observed.take_first_refusal()?;
    let mut later_ns = (first_refusal.is_none() && costs.modelled.is_some()).then_some(0);
    for _ in 0..LATER_PASSES {
        let Some(before) = later_ns else { break };
        let (pass, costs) = observed.pass(|observed| Player::new(program).pass(observed, OnOom::Stop))?;
        later_ns = costs.modelled.filter(|_| pass.ooms == 0).map(|modelled| before + modelled.total_ns);
    }
    let at = |bucket: &usize| buckets.at.get(*bucket).copied();
    let maps = match moments {
        Some(moments) => {
            let mut events: Vec<u64> = moments.iter().filter_map(at).chain([first.peak_reserved.1]).collect();
            events.sort_unstable();
            events.dedup();
            play(events)?.0.maps
        }
        None => Vec::new(),
    };
    let map_at = |event| maps.iter().find(|(at, _)| *at == event).map(|(_, map)| map.clone());
    let moments = moments.unwrap_or_default().iter();
    Ok(Sampled {
        reserved: first.reserved,
        allocated: first.allocated,
        peak_reserved: first.peak_reserved.0,
        refused_at: first.refused_at,
        calls: costs.calls.total(),
        driver_us: costs.modelled.map(|modelled| us(modelled.total_ns)),
        later_us: later_ns.map(|ns| us(ns / LATER_PASSES)),
        fullest: map_at(first.peak_reserved.1),
        moments: moments.filter_map(|bucket| Some((*bucket, map_at(at(bucket)?)?))).collect(),
        first_refusal,
    })
}

/// Leaves out the buckets after the refusal at which a pass stopped.
fn reached(range: &mut Range) {
    let reached = range.min.iter().position(|&least| least == u64::MAX).unwrap_or(range.min.len());
    range.min.truncate(reached);
    range.max.truncate(reached);
}

/// Samples of a pass.
#[derive(Debug)]
struct Samples {
    reserved: Range,
    allocated: Range,
    /// The most that was held, and the first event after which it was.
    peak_reserved: (u64, u64),
    refused_at: Vec<u64>,
    /// By event.
    maps: Vec<(u64, Map)>,
}

/// A subject that samples another after each event.
struct Sampler<'a, S> {
    observed: &'a mut Observed<S>,
    buckets: &'a Buckets,
    /// Events after which a map is taken; the next one is the last.
    events: Vec<u64>,
    /// The number of the event under way, from 1; 0 before the first.
    event: u64,
    /// The last event that counts: those after it free the blocks that are left.
    last: u64,
    on_oom: OnOom,
    samples: Samples,
    failed: Option<Failure>,
}

impl<'a, S: Opened> Sampler<'a, S> {
    fn new(observed: &'a mut Observed<S>, buckets: &'a Buckets, mut events: Vec<u64>, on_oom: OnOom) -> Sampler<'a, S> {
        events.reverse();
        let samples = Samples {
            reserved: Range::new(buckets.n),
            allocated: Range::new(buckets.n),
            peak_reserved: (0, 0),
            refused_at: Vec::new(),
            maps: Vec::new(),
        };
        Sampler { observed, buckets, events, event: 0, last: buckets.events, on_oom, samples, failed: None }
    }

    /// The event under way has ended.
    fn ended(&mut self) {
        if self.event == 0 || self.event > self.last {
            return;
        }
        let (reserved, allocated) = self.observed.held();
        let bucket = self.buckets.of(self.event);
        self.samples.reserved.add(bucket, reserved);
        self.samples.allocated.add(bucket, allocated);
        if reserved > self.samples.peak_reserved.0 {
            self.samples.peak_reserved = (reserved, self.event);
        }
        if self.events.last() == Some(&self.event) {
            self.events.pop();
            match self.observed.map() {
                Ok(map) => self.samples.maps.push((self.event, map)),
                Err(failure) => self.failed = self.failed.take().or(Some(failure.into())),
            }
        }
    }
}

impl<S: Opened> Subject for Sampler<'_, S> {
    type Handle = S::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<S::Handle, Refused> {
        self.observed.alloc(bytes, stream)
    }

    fn free(&mut self, handle: S::Handle) {
        self.observed.free(handle);
    }

    fn record_stream(&mut self, handle: &mut S::Handle, stream: u16) -> Result<(), Refused> {
        self.observed.record_stream(handle, stream)
    }

    fn begin_event(&mut self) {
        self.ended();
        self.event += 1;
        self.observed.begin_event();
    }

    fn refused(&mut self, refusal: Refusal) {
        self.samples.refused_at.push(self.event);
        if matches!(self.on_oom, OnOom::Stop) {
            self.last = self.event;
        }
        self.observed.refused(refusal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;
    use aquifer_trace::input;
    use aquifer_trace::profile::Profile;
    use aquifer_trace::{Piece, Use};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_row_has_what_is_free_on_the_device_behind_what_is_held() {
        let piece = |mib, is, starts| Piece { bytes: mib * MIB, is, stream: 0, starts, movable: 0 };
        let held = vec![piece(4, Use::Live, true), piece(6, Use::Free, false), piece(2, Use::Live, false)];
        let space = |spare| Space::of(&[(0, Map::new(held.clone(), spare * MIB, 64 * MIB))], true).unwrap();
        let tight = space(3);
        let (taken, per_mib) = (tight.rows[0].trim_end_matches('_'), COLUMNS / 15);
        assert_eq!(tight.rows[0].len(), COLUMNS);
        assert!(taken.matches('-').count().abs_diff(3 * per_mib) <= 3 && taken.ends_with('-'), "{taken}");
        let at = [tight.largest_free_at[0], space(7).largest_free_at[0]];
        assert_eq!(at, [4 * MIB, 12 * MIB], "in the cache, on the device");
        assert!(!space(0).rows[0].contains('-'));
    }

    #[test]
    fn samples_show_what_is_held_refused_and_where() {
        let text = "a 1 20971520 0\na 2 20971520 0\nf 1 0\na 3 20971520 1\na 4 83886080 0\nf 2 0\nf 3 1\n";
        let program = &input::read("p.trace".as_ref(), text.as_bytes()).unwrap()[0];
        let buckets = Profile::of(program).buckets;
        let global = Global { device: Some("sim:100MiB".parse().unwrap()), ..Global::default() };
        let session = Session::new(&global).unwrap();
        for config in ["backing:pytorch", "backing:expandable"] {
            let sampled = sample(&session, program, &config.parse().unwrap(), &buckets, Some(&[1, 3])).unwrap();
            assert_eq!(sampled.reserved.max[..4], [20, 40, 40, 60].map(|mib| mib * MIB), "{config}");
            assert_eq!(sampled.allocated.max, [20, 40, 20, 40, 40].map(|mib| mib * MIB), "{config}: it stops there");
            assert_eq!((sampled.peak_reserved, &sampled.refused_at[..]), (60 * MIB, &[5][..]), "{config}");
            let first = sampled.first_refusal.unwrap();
            assert_eq!((first.event, first.refusal.bytes), (5, 80 * MIB), "{config}");
            let live: Vec<u64> = sampled.moments.iter().map(|(_, map)| map.figures().live / MIB).collect();
            assert_eq!(live, [40, 40], "{config}");
            assert_eq!(sampled.fullest.unwrap().figures().live, 40 * MIB, "{config}");
        }
    }
}
