//! `fit`: the smallest device on which a recorded program finishes. A real device has one size, so
//! there it is the smallest limit.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer::Device;
use aquifer_trace::input::Program;
use aquifer_trace::{Aquifer, OnOom, Player, PyTorch};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{ConfigArg, FitArgs};
use crate::commands::{all_programs, failed, options, ratio};
use crate::exit::{Failure, Outcome};
use crate::opened::Opened;
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{bytes, factor};
use crate::text::Bytes;

/// The sizes of devices that are tried are multiples of this.
const STEP: u64 = 2 << 20;
/// Equal steps from the peak to the first boundary, at which sizes are tried. There were as many
/// for PyTorch's recorded figures.
const SPREAD_STEPS: u64 = 24;
/// How many sizes below a boundary are tried before it is taken for the lowest, and above it where
/// it is not.
const LOWER_SIZES: u64 = 64;

row! {
    /// The device is simulated, even where there is a GPU, and its size is replaced. --device may name
    /// another simulated device, or a GPU: there the size is that of a limit on what the allocator
    /// holds, and the most that is tried is what is free. Where frames that are split let a program
    /// finish on a smaller device, the key with_split_frames has the same row with split_frames:on,
    /// which is off by default, and the table another row; else it is null. Whether a program finishes
    /// need not be monotonic in the size, so smaller sizes were tried: 23 evenly spread down to the peak,
    /// and the 64 just below the boundary; where a smaller one does, the 64 above it, too. Work on
    /// streams is taken to be done at once: on a device, what several streams use waits for them, which
    /// may make a difference of some percent.
    ///
    /// JSON keys, per program and config
    pub(crate) struct Fitted {
        /// the program
        trace: String => ["program"],
        /// the options
        config: String => ["options", |row| options(&row.config)],
        /// the size of the smallest device: the program finishes there, and fails with 2 MiB less
        pub(super) smallest_device_bytes: u64 => ["smallest device", bytes],
        /// that size over peak_requested_bytes
        pub(super) smallest_over_requested: Option<f64> => ["smallest device, ratio", factor],
        /// the size from which on it finished at all sizes that were tried: more than the smallest where it
        /// fails on devices a little larger than that
        finishes_from_bytes: u64 => ["finishes from", bytes],
        /// the most memory that the program had requested and not yet freed
        peak_requested_bytes: u64 => ["requested", bytes],
        /// times that all cached memory was released to try again, on that device
        pub(super) retries_at_fit: u64 => ["retries"],
    }
}

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, the allocator fails, or standard output cannot be written.
pub fn run(session: &Session, args: &FitArgs) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::Done;
    let programs = all_programs(session, &args.recordings.files, &mut outcome);
    let configs = with_splitting(session.configs());
    let jobs = jobs(&programs, &configs);
    let fits = jobs.iter().zip(fit_all(session, &jobs));
    let mut rows: Vec<Fitted> = fits.filter_map(|(job, fit)| found(session, job, fit, &mut outcome)).collect();
    without_same(&mut rows, &configs, |row| &row.config, |row| (row.trace.clone(), row.smallest_device_bytes));
    show_rows(session, &rows, &configs, |row| &row.config)?;
    if !rows.is_empty() {
        session.show(Fitted::table(&rows))?;
    }
    Ok(outcome)
}

/// Writes JSON rows of the options that were asked for. That of a trial is a key of the row before.
pub(super) fn show_rows<R: Serialize>(
    session: &Session,
    rows: &[R],
    configs: &[ConfigArg],
    config: fn(&R) -> &str,
) -> Result<(), Failure> {
    let is_trial = |row: &&R| configs.iter().any(|one| one.is_trial && one.text == config(row));
    let mut rows = rows.iter().peekable();
    while let Some(row) = rows.next() {
        session.row(&WithSplitting { row, with_split_frames: rows.next_if(is_trial) })?;
    }
    Ok(())
}

/// A row, and that of the same options with `split_frames:on` if that makes a difference.
#[derive(Serialize)]
pub(super) struct WithSplitting<'a, R> {
    #[serde(flatten)]
    pub(super) row: &'a R,
    pub(super) with_split_frames: Option<&'a R>,
}

/// What a search found. Its failure is reported, unless the same options without splitting fit
/// nowhere, either.
pub(super) fn found(
    session: &Session,
    job: &Job<'_>,
    fit: Result<Fitted, Failure>,
    outcome: &mut Outcome,
) -> Option<Fitted> {
    match fit {
        Ok(fit) => Some(fit),
        Err(Failure::OutOfMemory(_)) if job.config.is_trial => None,
        Err(failure) => {
            failed(session, job.name, &failure, outcome);
            None
        }
    }
}

/// The options, each followed by the same with `split_frames:on` as a trial where that may differ.
pub(super) fn with_splitting(configs: &[ConfigArg]) -> Vec<ConfigArg> {
    let is_new = |new: &ConfigArg| configs.iter().all(|known| !known.is_same(new));
    let both = configs.iter().map(|config| [Some(config.clone()), config.splitting().filter(is_new)]);
    both.flatten().flatten().collect()
}

/// Removes the rows of the trials that [`with_splitting`] added, unless they differ for a program.
/// The rows of a program have the order of the options.
pub(super) fn without_same<R, F: PartialEq>(
    rows: &mut Vec<R>,
    configs: &[ConfigArg],
    config: fn(&R) -> &str,
    figures: fn(&R) -> F,
) {
    for trial in configs.iter().filter(|config| config.is_trial) {
        let is_other = |pair: &[R]| config(&pair[1]) == trial.text && figures(&pair[0]) != figures(&pair[1]);
        if !rows.windows(2).any(is_other) {
            rows.retain(|row| config(row) != trial.text);
        }
    }
}

/// A program, and the options.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) name: &'a str,
    pub(super) program: &'a Program,
    pub(super) config: &'a ConfigArg,
    /// Whether a device suffices that is up to 1/512 larger than the smallest.
    pub(super) roughly: bool,
}

impl<'a> Job<'a> {
    pub(super) fn new(name: &'a str, program: &'a Program, config: &'a ConfigArg) -> Job<'a> {
        Job { name, program, config, roughly: false }
    }

    /// The same with a rough result, which takes a tenth of the time.
    pub(super) fn roughly(self) -> Job<'a> {
        Job { roughly: true, ..self }
    }
}

/// Each program with each of the options.
pub(super) fn jobs<'a>(programs: &'a [(String, Program)], configs: &'a [ConfigArg]) -> Vec<Job<'a>> {
    let all = programs.iter().flat_map(|(name, program)| configs.iter().map(move |config| (name, program, config)));
    all.map(|(name, program, config)| Job::new(name, program, config)).collect()
}

/// Fits all, several at a time on simulated devices; the results are in the order of the jobs.
pub(super) fn fit_all(session: &Session, jobs: &[Job<'_>]) -> Vec<Result<Fitted, Failure>> {
    let bar = session.progress(jobs.len() as u64, "fit");
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<Fitted, Failure>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        while let Some((job, result)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(index).zip(results.get(index))
        } {
            let row = fit(session, job, &bar);
            if let Ok(mut result) = result.lock() {
                *result = Some(row);
            }
            bar.inc(1);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    // On a real device the programs would share the memory.
    let threads = if session.sim().is_some() { cores.min(jobs.len()) } else { 1 };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    bar.finish_and_clear();
    results.into_iter().filter_map(|result| result.into_inner().ok().flatten()).collect()
}

/// Searches for the smallest device.
fn fit(session: &Session, job: &Job<'_>, bar: &ProgressBar) -> Result<Fitted, Failure> {
    let attempt = |bytes| {
        bar.set_message(format!("{} {}", job.name, Bytes(bytes)));
        attempt(session, job, bytes)
    };
    let peak = job.program.peak_requested_bytes;
    let most = session.most_bytes()? / STEP * STEP;
    // Smaller than the live bytes at the peak.
    let least = (peak.saturating_sub(1) / STEP * STEP).min(most);
    let step = job.roughly.then(|| (peak / 512).next_multiple_of(STEP).max(STEP));
    let fit = search(least, most, step, attempt)?;
    // Warnings of the allocator are shown for the device that is named, not for those that are
    // tried.
    if job.config.pytorch.is_none() {
        let (device, config) = session.sized(fit.as_ref().map_or(most, |fit| fit.bytes), job.config)?;
        session.allocator(&device, &config)?;
    }
    let Some(fit) = fit else { return Err(Failure::OutOfMemory(fits_nowhere(session, job, most))) };
    Ok(Fitted {
        trace: job.name.to_owned(),
        config: job.config.text.clone(),
        smallest_device_bytes: fit.bytes,
        finishes_from_bytes: fit.finishes_from,
        smallest_over_requested: ratio(fit.bytes, peak),
        peak_requested_bytes: peak,
        retries_at_fit: fit.retries,
    })
}

/// Searches above `least` for the smallest size at which an attempt finishes; `None` if it finishes
/// at none. With `roughly`, the result is up to so much larger.
///
/// Whether a program finishes is not quite monotonic in the size: a larger device may let it
/// fragment more. So bisection finds a boundary, and lower ones are searched among sizes spread
/// down to `least`, and then near the lowest.
fn search(
    least: u64,
    most: u64,
    roughly: Option<u64>,
    attempt: impl Fn(u64) -> Result<Option<u64>, Failure>,
) -> Result<Option<Fit>, Failure> {
    let bisect = |mut fails, mut fit: Fit| -> Result<Fit, Failure> {
        while fit.bytes - fails > roughly.unwrap_or(STEP) {
            let middle = fails + (fit.bytes - fails) / 2 / STEP * STEP;
            match attempt(middle)? {
                Some(retries) => fit = Fit { bytes: middle, retries, ..fit },
                None => fails = middle,
            }
        }
        Ok(fit)
    };
    let Some((fails, fit)) = grow(least, most, &attempt)? else { return Ok(None) };
    let mut fit = bisect(fails, fit)?;
    fit.finishes_from = fit.bytes;
    if roughly.is_some() {
        return Ok(Some(fit));
    }
    let gap = fit.bytes - least;
    // All sizes of a small gap are tried below.
    if gap > LOWER_SIZES * STEP {
        let mut fails = least;
        for part in 1..SPREAD_STEPS {
            let bytes = least + gap / SPREAD_STEPS * part / STEP * STEP;
            if let Some(retries) = attempt(bytes)? {
                fit = bisect(fails, Fit { bytes, retries, ..fit })?;
                break;
            }
            fails = bytes;
        }
    }
    // One step less is known to fail.
    let mut steps = 2;
    while steps <= LOWER_SIZES && fit.bytes > least + steps * STEP {
        let bytes = fit.bytes - steps * STEP;
        match attempt(bytes)? {
            Some(retries) => (fit, steps) = (Fit { bytes, retries, ..fit }, 1),
            None => steps += 1,
        }
    }
    // Where a smaller size does, a larger one than the boundary may not.
    let boundary = fit.finishes_from;
    for steps in (1..=LOWER_SIZES).rev().filter(|_| fit.bytes < boundary) {
        let bytes = boundary + steps * STEP;
        if bytes <= most && attempt(bytes)?.is_none() {
            fit.finishes_from = bytes + STEP;
            break;
        }
    }
    Ok(Some(fit))
}

/// A size at which the program finishes, and the number of retries there.
struct Fit {
    bytes: u64,
    retries: u64,
    /// From here on it finished wherever that was tried.
    finishes_from: u64,
}

/// The reason that no device is large enough.
fn fits_nowhere(session: &Session, job: &Job<'_>, most: u64) -> String {
    let largest = match session.sim() {
        Some(sim) if !sim.faults.is_empty() => {
            let faults: Vec<String> = sim.faults.iter().map(ToString::to_string).collect();
            format!("it does not finish on any device with {}, as asked for with --device", faults.join(","))
        }
        Some(_) => format!("it does not finish on the largest device there is, of {}", Bytes(most)),
        None => format!("it does not finish in the {} that are free on {}", Bytes(most), session.device_text()),
    };
    match job.config.config.limit_bytes(most, most) {
        Some(limit) => format!("{largest}, for the limit of {} that the options set there", Bytes(limit)),
        None => largest,
    }
}

/// Sizes at which the program fails and finishes, found by growing from one at which it fails;
/// `None` if it finishes at none.
fn grow(
    mut fails: u64,
    most: u64,
    mut attempt: impl FnMut(u64) -> Result<Option<u64>, Failure>,
) -> Result<Option<(u64, Fit)>, Failure> {
    let mut bytes = fails + STEP;
    while bytes <= most {
        if let Some(retries) = attempt(bytes)? {
            return Ok(Some((fails, Fit { bytes, retries, finishes_from: bytes })));
        }
        fails = bytes;
        // By an eighth: most programs need little more than their peak.
        bytes += (bytes / 8).next_multiple_of(STEP);
        if fails < most {
            bytes = bytes.min(most);
        }
    }
    Ok(None)
}

/// Plays the program on a device of this size. Returns the number of retries if it finishes.
pub(super) fn attempt(session: &Session, job: &Job<'_>, bytes: u64) -> Result<Option<u64>, Failure> {
    let (device, config) = session.sized(bytes, &job.config.clone().trial())?;
    match &config.pytorch {
        None => attempt_on::<Aquifer>(session, job, &device, &config),
        Some(_) => attempt_on::<PyTorch>(session, job, &device, &config),
    }
}

fn attempt_on<S: Opened>(
    session: &Session,
    job: &Job<'_>,
    device: &Device,
    config: &ConfigArg,
) -> Result<Option<u64>, Failure> {
    let mut subject = S::open(session, device, config, job.program.streams.len())?;
    let pass = Player::new(job.program).pass(&mut subject, OnOom::Stop)?;
    Ok((pass.ooms == 0).then_some(subject.stats().num_alloc_retries))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size that is found, and from which on it finishes, in steps, of a program that finishes
    /// at these.
    fn found(least: u64, roughly: Option<u64>, finishes: impl Fn(u64) -> bool) -> Option<[u64; 2]> {
        let attempt = |bytes: u64| Ok(finishes(bytes / STEP).then_some(7));
        let fit = search(least * STEP, 10_000 * STEP, roughly, attempt).unwrap();
        fit.map(|fit| [fit.bytes, fit.finishes_from].map(|bytes| bytes / STEP))
    }

    #[test]
    fn the_boundary_is_found_and_lower_ones() {
        assert_eq!(found(100, None, |steps| steps >= 777), Some([777, 777]));
        assert_eq!(found(100, None, |steps| steps >= 101), Some([101, 101]));
        assert_eq!(found(100, None, |steps| steps >= 777 || steps == 730), Some([730, 777]), "near the boundary");
        let holed = |steps| (steps >= 777 && steps != 800) || steps == 730;
        assert_eq!(found(100, None, holed), Some([730, 801]), "above the boundary, too");
        let far = found(1000, None, |steps| steps >= 3000 || (1500..1800).contains(&steps)).unwrap();
        assert_eq!(far[0], 1500, "far below");
        assert_eq!(found(100, None, |_| false), None);
        let [rough, from] = found(1000, Some(50 * STEP), |steps| steps >= 3000).unwrap();
        assert!((3000..=3050).contains(&rough) && from == rough, "{rough}");
    }
}
