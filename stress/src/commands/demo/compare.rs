//! The comparison at the end of the demonstration.

use aquifer_trace::input::Program;
use aquifer_trace::profile::Profile;
use aquifer_trace::{OnOom, Player};
use serde::Serialize;

use super::{EXPANDABLE, POLICIES, PYTORCH};
use crate::cli::ConfigArg;
use crate::commands::fit::{Job, fit_all, with_splitting, without_same};
use crate::commands::study::sampled::sample;
use crate::commands::{options, ratio, violations};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::stage::Stage;
use crate::table::{Table, number, optional, table};
use crate::text::Bytes;

/// A recording under some options. `demo --help` explains the fields.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    trace: String,
    config: String,
    peak_requested_bytes: u64,
    peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    driver_calls: u64,
    smallest_device_bytes: Option<u64>,
    smallest_over_requested: Option<f64>,
    retries_at_fit: Option<u64>,
    ooms: u64,
    violations: u64,
    /// The allocator that the options choose, and its other options.
    #[serde(skip)]
    allocator: (&'static str, String),
    /// Whether the options allow a cache.
    #[serde(skip)]
    caches: bool,
}

impl Compared {
    /// Its effect on the exit code.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Compared { violations: 1.., .. } => Outcome::Violations,
            Compared { ooms: 1.., .. } | Compared { smallest_device_bytes: None, .. } => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }
}

pub(super) fn compare(session: &Session, programs: &[Program]) -> Result<Vec<Compared>, Failure> {
    let maps = session.sim().is_none_or(|sim| sim.vmm);
    let mut policies = with_splitting(&session.configs_with(&POLICIES));
    policies.retain(|policy| maps || !policy.pytorch.as_ref().is_some_and(|options| options.expandable_segments));
    let jobs: Vec<Job<'_>> = programs
        .iter()
        .flat_map(|program| policies.iter().map(move |config| Job::new(&program.name, program, config)))
        .collect();
    let mut compared = Vec::new();
    for (job, fit) in jobs.iter().zip(fit_all(session, &jobs)) {
        let fit = match fit {
            Ok(fit) => Some(fit),
            // The same options without splitting fit nowhere, either, which is reported.
            Err(Failure::OutOfMemory(_)) if job.config.is_trial => None,
            Err(Failure::OutOfMemory(why)) => {
                session.message(format_args!("out of memory: {} with {}: {why}", job.name, options(&job.config.text)));
                None
            }
            Err(failure) => return Err(failure),
        };
        let roomy = session.resized(plenty(job.program));
        let (name, others) = allocator(job.config);
        let sampled = sample(&roomy, job.program, job.config, &Profile::of(job.program).buckets, None)?;
        compared.push(Compared {
            trace: job.name.to_owned(),
            config: job.config.text.clone(),
            peak_requested_bytes: job.program.peak_requested_bytes,
            peak_reserved_bytes: sampled.peak_reserved,
            reserved_over_requested: ratio(sampled.peak_reserved, job.program.peak_requested_bytes),
            driver_calls: sampled.calls,
            smallest_device_bytes: fit.as_ref().map(|fit| fit.smallest_device_bytes),
            smallest_over_requested: fit.as_ref().and_then(|fit| fit.smallest_over_requested),
            retries_at_fit: fit.map(|fit| fit.retries_at_fit),
            ooms: sampled.refused_at.len() as u64,
            violations: if job.config.pytorch.is_some() { 0 } else { checked(&roomy, job)? },
            allocator: (name, others.to_owned()),
            caches: !job.config.config.no_cache,
        });
    }
    without_same(
        &mut compared,
        &policies,
        |row| &row.config,
        |row| (row.trace.clone(), row.smallest_device_bytes, row.ooms == 0),
    );
    Ok(compared)
}

/// The allocator that these options choose, and the others in the words of its users.
fn allocator(config: &ConfigArg) -> (&'static str, &str) {
    let rest = |backing| config.text.strip_prefix(backing).map(|rest| rest.trim_start_matches(','));
    match &config.pytorch {
        None => ("Aquifer", &config.text),
        Some(options) if options.expandable_segments => {
            ("PyTorch, expandable segments", rest(EXPANDABLE).unwrap_or(&config.text))
        }
        Some(_) => ("PyTorch", rest(PYTORCH).unwrap_or(&config.text)),
    }
}

/// Plays a program whose streams write to every block. Returns the number of violations.
fn checked(session: &Session, job: &Job<'_>) -> Result<u64, Failure> {
    let device = session.open()?;
    let mut stage = Stage::new(session, &device, job.config, job.program.streams.len())?;
    Player::new(job.program).play(&mut stage, OnOom::Skip)?;
    Ok(violations(session, job.name, &device))
}

/// A device with plenty of memory, below the size at which granules get larger.
fn plenty(program: &Program) -> u64 {
    let peak = program.peak_requested_bytes;
    peak.saturating_mul(64).min(512 << 30).max(peak.saturating_mul(4)).next_multiple_of(1 << 30)
}

/// The rows of each recording under its name.
pub(super) fn tabulate(compared: &[Compared]) -> Table {
    let table = table(
        compared,
        1,
        &[
            ("allocator", |row| match &row.allocator {
                (name, options) if options.is_empty() => (*name).to_owned(),
                (name, options) => format!("{name} with {options}"),
            }),
            ("holds", |row| optional((row.ooms == 0).then_some(Bytes(row.peak_reserved_bytes)))),
            ("holds, ratio", |row| number(row.reserved_over_requested.filter(|_| row.ooms == 0), 3)),
            ("smallest device", |row| optional(row.smallest_device_bytes.map(Bytes))),
            ("smallest device, ratio", |row| number(row.smallest_over_requested, 3)),
            ("driver calls", |row| optional((row.ooms == 0).then_some(row.driver_calls))),
        ],
    );
    table.grouped(compared.iter().map(|row| format!("{} uses at most {}:", row.trace, Bytes(row.peak_requested_bytes))))
}

/// A summary of the rows of a recording.
pub(super) fn findings(trace: &str, compared: &[Compared]) -> Option<String> {
    let rows = || compared.iter().filter(|row| row.trace == trace && row.ooms == 0);
    let usual = rows().find(|row| row.config.is_empty())?;
    let pytorch = rows().filter(|row| row.config.starts_with(PYTORCH) || row.config == EXPANDABLE);
    let fitting = pytorch.filter_map(|row| Some((row, row.smallest_device_bytes?)));
    let (best, best_device) = fitting.min_by_key(|&(_, device)| device)?;
    let mut text = format!(
        "{trace} finishes on {} with Aquifer. The best of PyTorch's rows is {} with {}: {}, and where there is plenty, \
         it holds {} instead of {}.",
        Bytes(usual.smallest_device_bytes?),
        best.allocator.0,
        options(&best.allocator.1),
        Bytes(best_device),
        Bytes(best.peak_reserved_bytes),
        Bytes(usual.peak_reserved_bytes)
    );
    if let Some(none) = rows().find(|row| !row.caches) {
        text += &format!(
            " Without a cache it holds what it uses, at the price of {} driver calls instead of {}, and of waiting for \
             the device each time that some goes back.",
            none.driver_calls, usual.driver_calls
        );
    }
    Some(text)
}
