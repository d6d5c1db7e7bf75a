//! `soak`: memory under load, verified by the device itself.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer::{Allocator, Device};
use serde::Serialize;

use crate::cli::SoakArgs;
use crate::commands::{hundredths, record_history, save, violations};
use crate::exit::{Failure, Outcome};
use crate::live::{self, Progress, Reading};
use crate::session::Session;
use crate::soak::{self, Counts, Plan};
use crate::table::terminal_columns;
use crate::text::{Bytes, wrap};

/// Memory of a soak on a simulated device, where the host writes every byte.
const SIMULATED_LIMIT: u64 = 24 << 20;
/// The same in granules, if that is more: a soak needs several of them.
const SIMULATED_GRANULES: u64 = 12;
/// Entries of the history that a snapshot has, of up to 40 bytes each.
const HISTORY_ENTRIES: usize = 1_000_000;
/// Operations by default.
const OPERATIONS: u64 = 20_000;

/// The result. `soak --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub device: String,
    pub config: String,
    pub seed: u64,
    pub seeds: u64,
    pub threads: u16,
    pub streams: u16,
    pub limit_bytes: u64,
    #[serde(flatten)]
    pub counts: Counts,
    pub mismatches: u64,
    pub not_given_back_bytes: u64,
    pub violations: u64,
    pub seconds: f64,
    pub operations_per_s: f64,
    pub gb_per_s: f64,
}

/// Runs the command.
///
/// # Errors
/// When several configs are given, a snapshot is to be saved of several seeds, the device cannot be
/// opened, something fails for another reason than lack of memory, or standard output cannot be
/// written.
pub fn run(session: &Session, args: &SoakArgs) -> Result<Outcome, Failure> {
    session.config()?;
    if args.snapshot.is_some() && args.seeds > 1 {
        return Err(Failure::Usage(format!("--snapshot takes one seed, not --seeds {}", args.seeds)));
    }
    let start = Instant::now();
    let operations = args.ops.or(args.minutes.is_none().then_some(OPERATIONS));
    let mut row = Row {
        device: session.device_text().to_owned(),
        config: session.config()?.text.clone(),
        seed: session.seed(),
        threads: args.threads,
        streams: args.streams,
        ..Row::default()
    };
    // A time beyond the range of the clock means no end.
    let end = |share: f64| args.minutes.and_then(|m| start.checked_add(Duration::from_secs_f64(m * 60.0 * share)));
    let watched = Watched { stop: at_interrupt()?, ..Watched::default() };
    let done = || {
        let time = args.minutes.map(|minutes| start.elapsed().as_secs_f64() / (minutes * 60.0));
        let work = operations.map(|each| share(watched.operations(each), each.saturating_mul(args.seeds)));
        time.into_iter().chain(work).reduce(f64::max)
    };
    let progress = || Progress { readings: watched.reading(session.device_text()), done: done() };
    live::watch(session, "soak", progress, |_| {
        let is_over = || end(1.0).is_some_and(|end| Instant::now() >= end) || watched.is_stopped();
        while row.seeds < args.seeds && !is_over() {
            let seed = session.seed().wrapping_add(row.seeds);
            let until = end(share(row.seeds + 1, args.seeds));
            one(session, args, seed, operations, until, &mut row, &watched)?;
        }
        Ok::<(), Failure>(())
    })?;
    if watched.is_stopped() {
        session.message("interrupted; the result up to here:");
    }
    for mismatch in &row.counts.mismatches {
        session.message(format_args!("mismatch: {mismatch}"));
    }
    row.time(start.elapsed());
    session.row(&row)?;
    session.show(&row)?;
    Ok(match row {
        Row { violations: 1.., .. } => Outcome::Violations,
        Row { mismatches: 0, not_given_back_bytes: 0, .. } => Outcome::Done,
        _ => Outcome::Failed,
    })
}

/// What is shown of a soak while it runs.
#[derive(Debug, Default)]
struct Watched {
    allocator: Mutex<Option<Allocator>>,
    /// Operations of this seed that have begun, or were about to.
    begun: AtomicU64,
    /// Operations of earlier seeds.
    earlier: AtomicU64,
    /// The user has interrupted the soak.
    stop: Arc<AtomicBool>,
}

/// A flag that the first interrupt sets. The second one ends the process.
fn at_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    #[cfg(unix)]
    {
        use signal_hook::consts::SIGINT;
        use signal_hook::flag::{register, register_conditional_shutdown};
        let code = 128 + SIGINT;
        let registered = register_conditional_shutdown(SIGINT, code, Arc::clone(&stop))
            .and_then(|_| register(SIGINT, Arc::clone(&stop)));
        registered.map_err(|cause| Failure::Signals { cause })?;
    }
    Ok(stop)
}

impl Watched {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn set(&self, allocator: Option<Allocator>) {
        *self.allocator.lock().unwrap_or_else(PoisonError::into_inner) = allocator;
    }

    /// Operations so far, of which each seed has at most so many.
    fn operations(&self, each: u64) -> u64 {
        self.earlier.load(Ordering::Relaxed).saturating_add(self.begun.load(Ordering::Relaxed).min(each))
    }

    fn reading(&self, device: &str) -> Vec<Reading> {
        let allocator = self.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        let reading = allocator.as_ref().map(|allocator| {
            let (stats, external) = (allocator.stats(), allocator.fragmentation(0).external);
            Reading {
                name: device.to_owned(),
                limit: allocator.limit().unwrap_or_else(|| allocator.device().info().total_bytes),
                reserved: stats.reserved_bytes.all.current,
                allocated: stats.allocated_bytes.all.current,
                external,
                allocations: stats.allocation.all.allocated,
                ooms: stats.num_ooms,
            }
        });
        reading.into_iter().collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share of minutes, or of work")]
fn share(done: u64, all: u64) -> f64 {
    done as f64 / all as f64
}

/// Soaks a new allocator; on a new device if it is a simulated one.
fn one(
    session: &Session,
    args: &SoakArgs,
    seed: u64,
    operations: Option<u64>,
    until: Option<Instant>,
    row: &mut Row,
    watched: &Watched,
) -> Result<(), Failure> {
    let (device, config) = (session.open_with_seed(seed)?, session.config()?);
    let allocator = session.allocator(&device, config)?;
    let limit = limit(session, args, &device, &allocator)?;
    let plan = Plan { seed, threads: args.threads, streams: args.streams, limit, operations, until };
    if args.snapshot.is_some() {
        record_history(&allocator, HISTORY_ENTRIES);
    }
    watched.set(Some(allocator.clone()));
    let soaked = soak::run(&allocator, &plan, &watched.begun, &watched.stop);
    watched.set(None);
    watched.begun.store(0, Ordering::Relaxed);
    watched.earlier.fetch_add(soaked.as_ref().map_or(0, |counts| counts.operations), Ordering::Relaxed);
    let soaked = soaked.inspect_err(|_| session.message(format_args!("seed {seed}:")));
    // The snapshot matters most after a failure.
    let saved = args.snapshot.as_ref().map_or(Ok(()), |path| save(session, &allocator.snapshot(), path));
    row.counts.add(soaked?);
    saved?;
    allocator.empty_cache()?;
    row.not_given_back_bytes += allocator.memory_reserved();
    drop(allocator);
    row.violations += violations(session, &format!("seed {seed}"), &device);
    (row.limit_bytes, row.seeds) = (limit, row.seeds + 1);
    Ok(())
}

/// The memory to use: from the arguments or the options, else half of the free memory; little on a
/// simulated device.
fn limit(session: &Session, args: &SoakArgs, device: &Device, allocator: &Allocator) -> Result<u64, Failure> {
    let total = device.info().total_bytes;
    if let Some(limit) = args.limit {
        let (limit, total) = (Bytes(limit), Bytes(total));
        let more = || Failure::Usage(format!("--limit-mb: {limit} are more than the device has, which is {total}"));
        return if limit > total { Err(more()) } else { Ok(limit.0) };
    }
    if let Some(limit) = allocator.limit() {
        return Ok(limit);
    }
    let (half, granule) = (device.memory_info()?.free / 2, allocator.granule_bytes().unwrap_or(0));
    let simulated = SIMULATED_LIMIT.max(granule.saturating_mul(SIMULATED_GRANULES));
    Ok(if session.sim().is_some() { half.min(simulated) } else { half })
}

impl Row {
    /// Sets the fields that depend on the duration.
    #[expect(clippy::cast_precision_loss, reason = "rates to display")]
    fn time(&mut self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let bytes = self.counts.bytes_written.saturating_add(self.counts.bytes_verified);
        self.mismatches = self.counts.mismatches.len() as u64;
        self.seconds = hundredths(seconds);
        self.operations_per_s = hundredths(self.counts.operations as f64 / seconds);
        self.gb_per_s = hundredths(bytes as f64 / seconds / 1e9);
    }
}

/// The width of labels, with the blanks around them.
const LABELS: usize = 17;

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.counts;
        let last_seed = self.seed.wrapping_add(self.seeds.saturating_sub(1));
        write!(f, "{} operations in {:.1} s ({:.0}/s)", counts.operations, self.seconds, self.operations_per_s)?;
        let lines = [
            ("seeds", format!("{} to {last_seed}, {} threads, {} streams", self.seed, self.threads, self.streams)),
            ("holds", format!("{} at most, of {}", Bytes(counts.peak_reserved_bytes), Bytes(self.limit_bytes))),
            (
                "blocks",
                format!(
                    "{} allocated, {} compared, {} copies, {} to other threads",
                    counts.allocs, counts.blocks_verified, counts.copies, counts.handed_over
                ),
            ),
            ("host", format!("{} blocks written by it, {} compared", counts.uploads, counts.downloads)),
            (
                "patterns",
                format!(
                    "{} written, {} compared, {:.2} GB/s",
                    Bytes(counts.bytes_written),
                    Bytes(counts.bytes_verified),
                    self.gb_per_s
                ),
            ),
            (
                "out of memory",
                format!("{} times survived; cached memory given back {} times", counts.ooms, counts.releases),
            ),
            (
                "mismatches",
                format!(
                    "{}; violations {}; not given back {}",
                    self.mismatches,
                    self.violations,
                    Bytes(self.not_given_back_bytes)
                ),
            ),
        ];
        let width = terminal_columns().unwrap_or(usize::MAX);
        for (label, text) in lines {
            let text = wrap(&text, width.saturating_sub(LABELS)).replace('\n', &format!("\n{:LABELS$}", ""));
            write!(f, "\n  {label:<0$}{text}", LABELS - 2)?;
        }
        Ok(())
    }
}
