//! The demonstration's figures as rows of results.

use serde::Serialize;

use super::compare::Compared;
use super::play::{Exhausted, Moving, Roomy};
use crate::commands::ratio;
use crate::input::Program;

/// A row of results. `demo --help` explains the fields.
#[derive(Debug, Serialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub(super) enum Row<'a> {
    Replay {
        trace: &'a str,
        device_bytes: u64,
        peak_requested_bytes: u64,
        peak_reserved_bytes: u64,
        allocated_bytes: u64,
        unused_segment_bytes: u64,
        pieces: usize,
        piece_bytes: u64,
        ooms: u64,
        hazards: u64,
    },
    Oom {
        trace: &'a str,
        device_bytes: u64,
        refused: bool,
        requested_bytes: Option<u64>,
        free_bytes: Option<u64>,
        largest_free_bytes: Option<u64>,
        error: Option<String>,
        advice: Vec<String>,
        blocks: usize,
        damaged: usize,
        served_again: bool,
        hazards: u64,
    },
    Remap {
        trace: &'a str,
        device_bytes: u64,
        refused: bool,
        peak_reserved_bytes: u64,
        reserved_over_requested: Option<f64>,
        remaps: u64,
        granules_moved: u64,
        damaged: usize,
        hazards: u64,
    },
    Compare {
        trace: &'a str,
        config: &'a str,
        peak_requested_bytes: u64,
        peak_reserved_bytes: u64,
        reserved_over_requested: Option<f64>,
        growths: u64,
        smallest_device_bytes: Option<u64>,
        ratio: Option<f64>,
        retries_at_fit: Option<u64>,
        ooms: u64,
        hazards: u64,
    },
}

impl<'a> Row<'a> {
    pub(super) fn replay(program: &'a Program, roomy: &Roomy) -> Row<'a> {
        Row::Replay {
            trace: &program.name,
            device_bytes: roomy.device_bytes,
            peak_requested_bytes: program.peak_requested_bytes,
            peak_reserved_bytes: roomy.reserved,
            allocated_bytes: roomy.live,
            unused_segment_bytes: roomy.unused,
            pieces: roomy.pieces,
            piece_bytes: roomy.in_pieces,
            ooms: roomy.ooms,
            hazards: roomy.hazards,
        }
    }

    pub(super) fn oom(program: &'a Program, device_bytes: u64, exhausted: &Exhausted) -> Row<'a> {
        let report = exhausted.report.as_ref();
        let free = |memory: Option<aquifer_device::MemoryInfo>| memory.map_or(0, |memory| memory.free);
        Row::Oom {
            trace: &program.name,
            device_bytes,
            refused: report.is_some(),
            requested_bytes: report.map(|report| report.requested),
            free_bytes: report.map(|report| report.free_in_pool + free(report.memory)),
            largest_free_bytes: report.map(|report| report.largest_free.max(free(report.memory))),
            error: report.map(|report| report.to_string().lines().next().unwrap_or_default().to_owned()),
            advice: report.iter().flat_map(|report| &report.advice).map(ToString::to_string).collect(),
            blocks: exhausted.blocks,
            damaged: exhausted.damaged,
            served_again: exhausted.served_again,
            hazards: exhausted.hazards,
        }
    }

    pub(super) fn remap(program: &'a Program, device_bytes: u64, moving: &Moving) -> Row<'a> {
        Row::Remap {
            trace: &program.name,
            device_bytes,
            refused: moving.report.is_some(),
            peak_reserved_bytes: moving.reserved,
            reserved_over_requested: ratio(moving.reserved, program.peak_requested_bytes),
            remaps: moving.remaps,
            granules_moved: moving.granules_moved,
            damaged: moving.damaged,
            hazards: moving.hazards,
        }
    }

    pub(super) fn compare(compared: &'a Compared) -> Row<'a> {
        Row::Compare {
            trace: &compared.trace,
            config: &compared.config,
            peak_requested_bytes: compared.requested,
            peak_reserved_bytes: compared.reserved,
            reserved_over_requested: ratio(compared.reserved, compared.requested),
            growths: compared.growths,
            smallest_device_bytes: compared.smallest_device,
            ratio: compared.smallest_device.and_then(|bytes| ratio(bytes, compared.requested)),
            retries_at_fit: compared.retries_at_fit,
            ooms: compared.ooms,
            hazards: compared.hazards,
        }
    }
}
