//! Contexts: the primary one of each device, those that programs create, and which one is current.
//!
//! A created context shares memory, streams and handles with the other contexts of its device; see
//! [`crate::process`].

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_device::{Code, Driver as _};

use crate::abi::{Answer, Handle, INVALID_CONTEXT, Out, abi, check_flags, code, needed, offer};
use crate::process::{Context, Process};
use crate::thread;

/// Flags of contexts: how threads wait, mapping of host memory, and others that change nothing
/// here.
const FLAGS: u32 = 0xff;

fn create(process: &Process, out: Out<'_, Handle>, flags: u32, ordinal: i32) -> Answer {
    let device = process.device(ordinal).ok_or(Code::INVALID_DEVICE)?;
    check_flags(flags, FLAGS)?;
    let out = needed(out)?;
    let context = process.add_context(device.ordinal);
    context.flags.store(flags, Ordering::Relaxed);
    thread::push(context.handle)?;
    device.activate(&context);
    out.write(context.handle);
    Ok(())
}

fn destroy(process: &Process, context: &Context) -> Answer {
    let ordinal = i32::try_from(context.ordinal).map_err(|_| INVALID_CONTEXT)?;
    let device = process.device(ordinal).ok_or(INVALID_CONTEXT)?;
    if device.primary.context.handle == context.handle {
        return Err(INVALID_CONTEXT);
    }
    context.life()?;
    device.deactivate(context);
    if thread::current() == Some(context.handle) {
        thread::pop()?;
    }
    Ok(())
}

/// The calling thread's current context.
fn current(process: &Process) -> Answer<Arc<Context>> {
    process.current()
}

abi! {
    /// Makes the device's primary context active, or counts one more user of it.
    7000 cuDevicePrimaryCtxRetain(call, out: Out<'_, Handle>, device: i32) {
        let device = call.device(device)?;
        let out = needed(out)?;
        let primary = &device.primary;
        let mut retained = primary.retained.lock();
        let more = retained.checked_add(1).ok_or(Code::OUT_OF_MEMORY)?;
        if *retained == 0 {
            device.activate(&primary.context);
        }
        *retained = more;
        out.write(primary.context.handle);
        Ok(())
    }

    /// Counts one user of the primary context less. The last one ends it.
    11000 cuDevicePrimaryCtxRelease_v2(call, device: i32) {
        if Process::get().release_ghost(device) {
            return Ok(());
        }
        let device = call.device(device)?;
        let primary = &device.primary;
        let mut retained = primary.retained.lock();
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if *retained == 0 {
            device.deactivate(&primary.context);
        }
        Ok(())
    }

    /// Ends all that was made in the primary context; its users keep it.
    11000 cuDevicePrimaryCtxReset_v2(call, device: i32) {
        call.device(device)?.reset()
    }

    /// The primary context's flags, and whether it is active.
    7000 cuDevicePrimaryCtxGetState(call, device: i32, flags: Out<'_, u32>, active: Out<'_, i32>) {
        let device = call.device(device)?;
        let (flags, active) = (needed(flags)?, needed(active)?);
        flags.write(device.primary.context.flags.load(Ordering::Relaxed));
        active.write((*device.primary.retained.lock() > 0).into());
        Ok(())
    }

    /// Sets the primary context's flags.
    11000 cuDevicePrimaryCtxSetFlags_v2(call, device: i32, flags: u32) {
        let device = call.device(device)?;
        check_flags(flags, FLAGS)?;
        device.primary.context.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    /// Creates a context and makes it current.
    3020 cuCtxCreate_v2(call, context: Out<'_, Handle>, flags: u32, device: i32) {
        create(call.process()?, context, flags, device)
    }

    /// As `cuCtxCreate_v2`; parts of a device cannot be asked for.
    11040 cuCtxCreate_v3(
        call, context: Out<'_, Handle>, affinities: *const c_void, count: i32, flags: u32, device: i32,
    ) {
        if !affinities.is_null() || count != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        create(call.process()?, context, flags, device)
    }

    /// As `cuCtxCreate_v2`; parameters cannot be given.
    12050 cuCtxCreate_v4(call, context: Out<'_, Handle>, parameters: *const c_void, flags: u32, device: i32) {
        if !parameters.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        create(call.process()?, context, flags, device)
    }

    /// Destroys a context that was created. Other threads where it is current get
    /// `CONTEXT_IS_DESTROYED` from then on.
    4000 cuCtxDestroy_v2(call, context: Handle) {
        let process = call.process()?;
        destroy(process, &*process.context(context)?)
    }

    /// The current context, or null.
    4000 cuCtxGetCurrent(call, context: Out<'_, Handle>) {
        call.process()?;
        needed(context)?.write(thread::current().unwrap_or(0));
        Ok(())
    }

    /// Puts a context in the place of the current one; null takes that off.
    4000 cuCtxSetCurrent(call, context: Handle) {
        let process = call.process()?;
        if context != 0 {
            process.context(context)?;
        }
        thread::replace((context != 0).then_some(context))
    }

    /// Makes a context current, above the one that is.
    4000 cuCtxPushCurrent_v2(call, context: Handle) {
        call.process()?.context(context)?;
        thread::push(context)
    }

    /// Takes the current context off.
    4000 cuCtxPopCurrent_v2(call, context: Out<'_, Handle>) {
        call.process()?;
        offer(context, thread::pop()?);
        Ok(())
    }

    /// The device of the current context.
    2000 cuCtxGetDevice(call, device: Out<'_, i32>) {
        let life = call.life()?;
        needed(device)?.write(i32::try_from(life.ordinal).map_err(|_| Code::INVALID_DEVICE)?);
        Ok(())
    }

    /// The flags of the current context.
    7000 cuCtxGetFlags(call, flags: Out<'_, u32>) {
        let context = current(call.process()?)?;
        context.life()?;
        needed(flags)?.write(context.flags.load(Ordering::Relaxed));
        Ok(())
    }

    /// Sets the flags of the current context.
    12010 cuCtxSetFlags(call, flags: u32) {
        let context = current(call.process()?)?;
        context.life()?;
        check_flags(flags, FLAGS)?;
        context.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    /// The version of contexts: that of all that can be created here.
    3020 cuCtxGetApiVersion(call, context: Handle, version: Out<'_, u32>) {
        let process = call.process()?;
        if context != 0 {
            process.context(context)?;
        } else {
            current(process)?;
        }
        needed(version)?.write(3020);
        Ok(())
    }

    /// Least and greatest priority of streams; the greatest is the lower number.
    5050 cuCtxGetStreamPriorityRange(call, least: Out<'_, i32>, greatest: Out<'_, i32>) {
        let life = call.life()?;
        let priorities = life.sim.info().priorities;
        offer(least, priorities.0);
        offer(greatest, priorities.1);
        Ok(())
    }

    /// Waits for the device.
    2000 cuCtxSynchronize(call) {
        call.life()?.sim.synchronize().map_err(code)
    }

    /// Lets the current context reach the plain memory of another device's. Noted for the whole
    /// device, and nothing else: copies between devices work without it.
    4000 cuCtxEnablePeerAccess(call, peer: Handle, flags: u32) {
        check_flags(flags, 0)?;
        let (peer, life) = (call.process()?.context(peer)?.life()?, call.life()?);
        if peer.ordinal == life.ordinal {
            return Err(Code::INVALID_DEVICE);
        }
        if life.peers.lock().insert(peer.ordinal) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }

    /// Takes that back.
    4000 cuCtxDisablePeerAccess(call, peer: Handle) {
        let (peer, life) = (call.process()?.context(peer)?.life()?, call.life()?);
        if life.peers.lock().remove(&peer.ordinal) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    }
}

const PEER_ACCESS_ALREADY_ENABLED: Code = Code(704);
const PEER_ACCESS_NOT_ENABLED: Code = Code(705);
