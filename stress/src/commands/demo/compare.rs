//! The comparison at the end of the demonstration.

use super::{SEGMENTS, policies};
use crate::commands::fit::{Job, fit_all};
use crate::commands::replay::hazards;
use crate::commands::{options, ratio};
use crate::exit::{Failure, Outcome};
use crate::harness::{OnOom, Player};
use crate::input::Program;
use crate::session::Session;
use crate::stage::Stage;
use crate::table::{NOTHING, table};
use crate::text::Bytes;

/// A recording under some options.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) trace: String,
    pub(super) config: String,
    pub(super) requested: u64,
    /// The most that it held on a device with plenty; if requests were refused there, for what was
    /// served.
    pub(super) reserved: u64,
    pub(super) growths: u64,
    /// `None` if it finishes on no device.
    pub(super) smallest_device: Option<u64>,
    pub(super) retries_at_fit: Option<u64>,
    /// Requests refused where there is plenty.
    pub(super) ooms: u64,
    pub(super) hazards: u64,
    /// Whether the options keep memory for later at all.
    caches: bool,
}

impl Compared {
    /// How the demonstration ends for it.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Compared { hazards: 1.., .. } => Outcome::Hazards,
            Compared { ooms: 1.., .. } | Compared { smallest_device: None, .. } => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }
}

pub(super) fn compare(session: &Session, programs: &[Program]) -> Result<Vec<Compared>, Failure> {
    let policies = policies(session)?;
    let jobs: Vec<Job<'_>> = programs
        .iter()
        .flat_map(|program| policies.iter().map(move |config| Job { name: &program.name, program, config }))
        .collect();
    let mut compared = Vec::new();
    for (job, fit) in jobs.iter().zip(fit_all(session, &jobs)) {
        let fit = match fit {
            Ok(fit) => Some(fit),
            Err(Failure::OutOfMemory(why)) => {
                session.message(format_args!("out of memory: {} with {}: {why}", job.name, options(&job.config.text)));
                None
            }
            Err(failure) => return Err(failure),
        };
        let device = session.open_with_capacity(plenty(job.program))?;
        let mut stage = Stage::new(session, &device, job.config, job.program.streams.len())?;
        let ooms = Player::new(job.program).play(&mut stage, OnOom::Skip)?;
        let stats = stage.allocator.stats();
        compared.push(Compared {
            trace: job.name.to_owned(),
            config: job.config.text.clone(),
            requested: job.program.peak_requested_bytes,
            reserved: stats.reserved_bytes.all.peak,
            growths: stats.num_device_alloc,
            smallest_device: fit.as_ref().map(|fit| fit.smallest_device_bytes),
            retries_at_fit: fit.map(|fit| fit.retries_at_fit),
            ooms,
            hazards: hazards(session, job.name, &device),
            caches: !job.config.config.no_cache,
        });
    }
    Ok(compared)
}

/// A device where nothing lacks memory, but of no size for which granules are larger than usual.
fn plenty(program: &Program) -> u64 {
    let peak = program.peak_requested_bytes;
    peak.saturating_mul(64).min(512 << 30).max(peak.saturating_mul(4)).next_multiple_of(1 << 30)
}

/// A table for each recording, under its name.
pub(super) fn tabulate(compared: &[Compared]) -> String {
    let recordings = compared.chunk_by(|one, other| one.trace == other.trace);
    let tables: Vec<String> = recordings.map(tabulate_one).collect();
    tables.join("\n\n")
}

fn tabulate_one(compared: &[Compared]) -> String {
    let mut table = table(&["options", "takes", "takes, ratio", "growths", "fits on", "fits on, ratio", "OOMs"], 1);
    for row in compared {
        let times = |bytes| ratio(bytes, row.requested).map_or_else(String::new, |times| format!("{times:.3}"));
        table.add_row([
            options(&row.config).to_owned(),
            Bytes(row.reserved).to_string(),
            if row.ooms == 0 { times(row.reserved) } else { NOTHING.to_owned() },
            row.growths.to_string(),
            row.smallest_device.map_or_else(|| NOTHING.to_owned(), |bytes| Bytes(bytes).to_string()),
            row.smallest_device.map_or_else(String::new, times),
            row.ooms.to_string(),
        ]);
    }
    let heading = compared.first().map(|row| format!("{} uses at most {}:\n", row.trace, Bytes(row.requested)));
    heading.unwrap_or_default() + &table.to_string()
}

/// What the rows of a recording say.
pub(super) fn findings(trace: &str, compared: &[Compared]) -> Option<String> {
    let rows = || compared.iter().filter(|row| row.trace == trace && row.ooms == 0);
    let usual = rows().find(|row| row.config.is_empty())?;
    let segments = rows().filter(|row| row.caches && row.config.starts_with(SEGMENTS));
    let fitting = segments.filter_map(|row| Some((row, row.smallest_device?)));
    let (best, best_device) = fitting.min_by_key(|&(_, device)| device)?;
    let mut text = format!(
        "{trace} finishes on {} with the defaults. The best of these options for segments is {}: {}, and where there is plenty, it \
         takes {} instead of {}.",
        Bytes(usual.smallest_device?),
        best.config,
        Bytes(best_device),
        Bytes(best.reserved),
        Bytes(usual.reserved)
    );
    if let Some(none) = rows().find(|row| !row.caches) {
        text += &format!(
            " Without a cache it takes what it uses, at the price of asking the driver for memory {} times instead of {}, and \
             of waiting for the device each time that some goes back.",
            none.growths, usual.growths
        );
    }
    Some(text)
}
