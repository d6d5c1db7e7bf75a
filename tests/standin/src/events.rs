//! Events.

use std::sync::atomic::Ordering;

use aquifer_device::{Code, Driver as _, RawEvent, RawStream};

use crate::abi::{Answer, Handle, Out, abi, check_flags, code, needed};
use crate::process::Life;
use crate::streams::ready;

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

fn elapsed(life: &Life, out: Out<'_, f32>, start: Handle, end: Handle) -> Answer {
    let out = needed(out)?;
    let milliseconds = life.sim.elapsed_ms(RawEvent(start), RawEvent(end)).map_err(code)?;
    #[allow(clippy::cast_possible_truncation, reason = "CUDA gives milliseconds in single precision")]
    out.write(milliseconds as f32);
    Ok(())
}

abi! {
    /// Creates an event. Those for other processes are refused.
    2000 cuEventCreate(call, event: Out<'_, Handle>, flags: u32) {
        let life = call.life()?;
        check_flags(flags, BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS)?;
        let out = needed(event)?;
        if flags & INTERPROCESS != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        out.write(life.sim.create_event(flags & DISABLE_TIMING == 0).map_err(code)?.0);
        life.spinning_events.fetch_add((flags & BLOCKING_SYNC == 0).into(), Ordering::Relaxed);
        Ok(())
    }

    /// Destroys an event.
    4000 cuEventDestroy_v2(call, event: Handle) {
        call.life()?.sim.destroy_event(RawEvent(event)).map_err(code)
    }

    /// Records the event at the end of the stream's present work.
    2000 cuEventRecord(call, event: Handle, stream: Handle) {
        call.life()?.sim.record(RawEvent(event), RawStream(stream)).map_err(code)
    }

    /// As `cuEventRecord`; events that a graph records for the outside are refused.
    11010 cuEventRecordWithFlags(call, event: Handle, stream: Handle, flags: u32) {
        let life = call.life()?;
        check_flags(flags, 1)?;
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        life.sim.record(RawEvent(event), RawStream(stream)).map_err(code)
    }

    /// Whether the event's latest record is reached.
    2000 cuEventQuery(call, event: Handle) {
        ready(call.guarded_life()?.sim.query_event(RawEvent(event)).map_err(code)?)
    }

    /// Waits for the event's latest record.
    2000 cuEventSynchronize(call, event: Handle) {
        call.guarded_life()?.sim.synchronize_event(RawEvent(event)).map_err(code)
    }

    /// Milliseconds between the latest records of two events.
    2000 cuEventElapsedTime(call, milliseconds: Out<'_, f32>, start: Handle, end: Handle) {
        elapsed(&*call.life()?, milliseconds, start, end)
    }

    /// As `cuEventElapsedTime`.
    12080 cuEventElapsedTime_v2(call, milliseconds: Out<'_, f32>, start: Handle, end: Handle) {
        elapsed(&*call.life()?, milliseconds, start, end)
    }
}
