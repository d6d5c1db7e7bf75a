//! Streams. Handles 0 and 1 mean the legacy default stream, 2 that of the calling thread; how these
//! order each other is the simulated device's business.

use std::collections::HashMap;

use aquifer_device::{Code, Driver as _, RawEvent, RawStream, StreamFlags};
use parking_lot::Mutex;

use crate::abi::{Answer, Handle, Out, abi, check_flags, code, needed};
use crate::process::Life;

const NON_BLOCKING: u32 = 1;

/// What a stream was created with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    flags: u32,
    priority: i32,
}

/// The streams that were created and are live.
#[derive(Debug, Default)]
pub(crate) struct StreamTable(Mutex<HashMap<Handle, Facts>>);

impl StreamTable {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    pub(crate) fn facts(&self, handle: Handle) -> Answer<Facts> {
        match handle {
            0..=2 => Ok(Facts::default()),
            _ => self.0.lock().get(&handle).copied().ok_or(Code::INVALID_HANDLE),
        }
    }
}

fn create(life: &Life, out: Out<'_, Handle>, flags: u32, priority: i32) -> Answer {
    check_flags(flags, NON_BLOCKING)?;
    let out = needed(out)?;
    let (least, greatest) = life.sim.info().priorities;
    let priority = priority.clamp(greatest, least);
    let stream = StreamFlags { non_blocking: flags & NON_BLOCKING != 0, priority };
    let stream = life.sim.create_stream(stream).map_err(code)?;
    life.streams.0.lock().insert(stream.0, Facts { flags, priority });
    out.write(stream.0);
    Ok(())
}

/// A finished call, or `NOT_READY`.
pub(crate) fn ready(done: bool) -> Answer {
    if done { Ok(()) } else { Err(Code::NOT_READY) }
}

abi! {
    /// Creates a stream.
    2000 cuStreamCreate(call, stream: Out<'_, Handle>, flags: u32) {
        create(&*call.life()?, stream, flags, 0)
    }

    /// Creates a stream with a priority, which is clamped to the device's range.
    5050 cuStreamCreateWithPriority(call, stream: Out<'_, Handle>, flags: u32, priority: i32) {
        create(&*call.life()?, stream, flags, priority)
    }

    /// Destroys a stream. Its work still runs. CUDA does not say what becomes of a capture that it
    /// is part of: here it cannot be ended any more, so that waits for the device fail.
    4000 cuStreamDestroy_v2(call, stream: Handle) {
        let life = call.life()?;
        if life.sim.capture_of(RawStream(stream)).is_some() {
            life.streams.0.lock().remove(&stream);
            return Ok(());
        }
        life.sim.destroy_stream(RawStream(stream)).map_err(code)?;
        life.streams.0.lock().remove(&stream);
        life.forget_capture(stream);
        Ok(())
    }

    /// Waits until the stream is idle.
    2000 cuStreamSynchronize(call, stream: Handle) {
        call.guarded_life()?.sim.synchronize_stream(RawStream(stream)).map_err(code)
    }

    /// Whether the stream is idle.
    2000 cuStreamQuery(call, stream: Handle) {
        ready(call.guarded_life()?.sim.query_stream(RawStream(stream)).map_err(code)?)
    }

    /// Makes later work of the stream wait for an event, which may be another device's.
    3020 cuStreamWaitEvent(call, stream: Handle, event: Handle, flags: u32) {
        let life = call.life()?;
        check_flags(flags, 0)?;
        let (stream, event) = (RawStream(stream), RawEvent(event));
        let others = || Ok::<_, Code>(call.process()?.others(&life).find(|other| other.sim.is_event(event)));
        let peer = if life.sim.is_event(event) { None } else { others()? };
        let waited = match peer {
            Some(peer) => life.sim.wait_peer(stream, &*peer.sim, event),
            None => life.sim.wait(stream, event),
        };
        waited.map_err(code)
    }

    /// The priority that the stream has.
    5050 cuStreamGetPriority(call, stream: Handle, priority: Out<'_, i32>) {
        needed(priority)?.write(call.life()?.streams.facts(stream)?.priority);
        Ok(())
    }

    /// The flags that the stream was created with.
    5050 cuStreamGetFlags(call, stream: Handle, flags: Out<'_, u32>) {
        needed(flags)?.write(call.life()?.streams.facts(stream)?.flags);
        Ok(())
    }

    /// A number of the stream that never comes back. Breaks a capture: most queries do, but for
    /// those about the capture itself (CUDA C++ core libraries, documentation of
    /// `is_stream_capturing`).
    12000 cuStreamGetId(call, stream: Handle, id: Out<'_, u64>) {
        let life = call.life()?;
        let out = needed(id)?;
        life.break_capture_of(stream)?;
        out.write(life.sim.stream_id(RawStream(stream)).map_err(code)?.ok_or(Code::NOT_SUPPORTED)?);
        Ok(())
    }

    /// The context of the stream: as contexts share the streams of their device, the current one.
    9020 cuStreamGetCtx(call, stream: Handle, context: Out<'_, Handle>) {
        call.life()?.streams.facts(stream)?;
        needed(context)?.write(call.process()?.current()?.handle);
        Ok(())
    }

    /// The device of the stream.
    12080 cuStreamGetDevice(call, stream: Handle, device: Out<'_, i32>) {
        let life = call.life()?;
        life.streams.facts(stream)?;
        needed(device)?.write(i32::try_from(life.ordinal).map_err(|_| Code::INVALID_DEVICE)?);
        Ok(())
    }
}
