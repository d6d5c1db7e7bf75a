//! Capture: what is recorded into a graph is the simulated device's business; here is who may call
//! what meanwhile.
//!
//! A capture has a *mode*, given when it begins, and so has each thread
//! (`cuThreadExchangeStreamCaptureMode`). While something captures, some calls are *potentially
//! unsafe*: they may wait for work that is being recorded and never runs. A thread must not make
//! them
//!
//! * in mode `RELAXED`: never mind;
//! * in mode `THREAD_LOCAL`: if a capture goes on that this thread began in another mode than
//!   `RELAXED`;
//! * in mode `GLOBAL`, which threads begin with: as before, and if any thread has a capture that
//!   began in mode `GLOBAL`.
//!
//! Such a call fails with `STREAM_CAPTURE_UNSUPPORTED` and breaks the captures that forbid it (CUDA
//! driver API, documentation of `cuThreadExchangeStreamCaptureMode` and `cuStreamBeginCapture`).
//! That documentation does not list the calls. Counted among them here: `cuMemAlloc`, `cuMemFree`,
//! `cuMemHostAlloc`, `cuMemFreeHost`, `cuMemHostRegister`, `cuMemHostUnregister`, `cuEventQuery`,
//! `cuEventSynchronize`, `cuStreamQuery`, `cuStreamSynchronize`, `cuModuleLoadData`,
//! `cuModuleUnload`, and `cuMemcpyPeerAsync`, which may go through memory of the driver's on the
//! host. Not counted: calls about mappings and address space, which PyTorch makes while it
//! captures.
//!
//! CUDA looks at all captures of the process, this library at those of the same device, so that
//! tests in parallel do not disturb each other. Calls that wait for a stream which captures, or for
//! its device, fail in any mode.

use std::thread::{self, ThreadId};

use aquifer_device::{CaptureStatus, Code, Driver as _, RawStream};
use parking_lot::Mutex;

use crate::abi::{Answer, CAPTURE_WRONG_THREAD, Handle, InOut, Out, UNKNOWN, abi, code, needed, offer};
use crate::process::Life;
use crate::thread as own;

/// How much a capture, or a thread, minds potentially unsafe calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub(crate) fn parse(mode: u32) -> Answer<Mode> {
        match mode {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// A capture in progress.
#[derive(Clone, Copy, Debug)]
struct Ongoing {
    /// The stream that it began on.
    stream: Handle,
    thread: ThreadId,
    mode: Mode,
    /// The graph that it makes.
    graph: Handle,
}

impl Ongoing {
    /// Whether it began on the stream that the calling thread means by `stream`.
    fn began_on(&self, stream: Handle) -> bool {
        let own = stream != RawStream::PER_THREAD.0 || self.thread == thread::current().id();
        self.stream == stream && own
    }

    /// Whether it forbids the calling thread potentially unsafe calls.
    fn forbids(&self) -> bool {
        let own_thread = self.thread == thread::current().id() && self.mode != Mode::Relaxed;
        match own::mode() {
            Mode::Relaxed => false,
            Mode::ThreadLocal => own_thread,
            Mode::Global => own_thread || self.mode == Mode::Global,
        }
    }
}

/// The captures in progress on a device.
#[derive(Debug, Default)]
pub(crate) struct Captures(Mutex<Vec<Ongoing>>);

impl Captures {
    /// The capture that began on `stream` is over.
    fn remove(&self, stream: Handle) {
        self.0.lock().retain(|ongoing| !ongoing.began_on(stream));
    }
}

impl Life {
    /// Refuses a potentially unsafe call where a capture forbids it, which breaks that capture.
    pub(crate) fn forbid_in_capture(&self) -> Answer {
        let broken: Vec<Ongoing> = self.captures.0.lock().iter().filter(|ongoing| ongoing.forbids()).copied().collect();
        if broken.is_empty() {
            return Ok(());
        }
        for ongoing in broken {
            // The default stream of another thread cannot be named from here; only that thread's
            // own calls break its capture.
            if ongoing.began_on(ongoing.stream) {
                self.sim.break_capture(RawStream(ongoing.stream));
            }
        }
        Err(Code::CAPTURE_UNSUPPORTED)
    }

    /// Refuses a call on a stream that captures, whose capture it breaks whatever its mode.
    pub(crate) fn break_capture_of(&self, stream: Handle) -> Answer {
        if self.sim.capture_status(RawStream(stream)).map_err(code)? == CaptureStatus::None {
            return Ok(());
        }
        self.sim.break_capture(RawStream(stream));
        Err(Code::CAPTURE_UNSUPPORTED)
    }

    /// The stream is gone, and the capture that began on it.
    pub(crate) fn forget_capture(&self, stream: Handle) {
        self.captures.remove(stream);
    }

    fn begin(&self, stream: Handle, mode: Mode) -> Answer {
        self.sim.begin_capture(RawStream(stream)).map_err(code)?;
        self.note_capture(stream, mode, self.graphs.reserve());
        Ok(())
    }

    /// A capture of a graph, or of a body, began on a stream.
    pub(crate) fn note_capture(&self, stream: Handle, mode: Mode, graph: Handle) {
        if let Some(capture) = self.sim.capture_of(RawStream(stream)) {
            self.conditionals.begin_capture(capture.number, graph);
        }
        self.captures.0.lock().push(Ongoing { stream, thread: thread::current().id(), mode, graph });
    }

    /// Whether a capture makes the graph.
    pub(crate) fn is_being_captured(&self, graph: Handle) -> bool {
        self.captures.0.lock().iter().any(|ongoing| ongoing.graph == graph)
    }

    fn end(&self, stream: Handle, graph: Out<'_, Handle>) -> Answer {
        let out = needed(graph)?;
        let other_thread = |ongoing: &Ongoing| {
            ongoing.began_on(stream) && ongoing.mode != Mode::Relaxed && ongoing.thread != thread::current().id()
        };
        if self.captures.0.lock().iter().any(other_thread) {
            return Err(CAPTURE_WRONG_THREAD);
        }
        // A capture that cannot end well gives no graph.
        out.write(0);
        // The end of a body gives the body itself.
        let ended = self.end_body(stream).unwrap_or_else(|| {
            let capture = self.sim.capture_of(RawStream(stream));
            let ended = self.sim.end_capture(RawStream(stream)).map_err(code);
            // Some errors leave the capture as it is.
            let is_over = self.sim.capture_of(RawStream(stream)).is_none();
            let graph = capture.filter(|_| is_over).and_then(|capture| self.conditionals.end_capture(capture.number));
            if let Some(graph) = graph {
                if ended.is_err() {
                    self.user_objects.forget(graph);
                }
                self.graphs.end_capture(graph, ended.as_ref().ok().copied());
            }
            ended.and_then(|_| graph.ok_or(UNKNOWN))
        });
        if self.sim.capture_of(RawStream(stream)).is_none() {
            self.captures.remove(stream);
        }
        out.write(ended?);
        Ok(())
    }

    fn capture_status(&self, stream: Handle) -> Answer<u32> {
        Ok(match self.sim.capture_status(RawStream(stream)).map_err(code)? {
            CaptureStatus::None => 0,
            CaptureStatus::Active => 1,
            _ => 2,
        })
    }

    /// Status and number of the capture that the stream is part of. The number is left alone where
    /// there is none.
    fn capture_info(&self, stream: Handle, status: Out<'_, u32>, number: Out<'_, u64>) -> Answer {
        let out = needed(status)?;
        out.write(self.capture_status(stream)?);
        if let Some(capture) = self.sim.capture_of(RawStream(stream)) {
            offer(number, capture.number);
        }
        Ok(())
    }
}

abi! {
    /// Starts capturing the stream.
    10010 cuStreamBeginCapture_v2(call, stream: Handle, mode: u32) {
        let life = call.life()?;
        life.begin(stream, Mode::parse(mode)?)
    }

    /// Ends a capture. Unless it began in mode `RELAXED`, the same thread must end it.
    10000 cuStreamEndCapture(call, stream: Handle, graph: Out<'_, Handle>) {
        call.life()?.end(stream, graph)
    }

    /// Whether the stream captures.
    10000 cuStreamIsCapturing(call, stream: Handle, status: Out<'_, u32>) {
        let life = call.life()?;
        needed(status)?.write(life.capture_status(stream)?);
        Ok(())
    }

    /// Whether the stream captures, and the number of the capture.
    10010 cuStreamGetCaptureInfo(call, stream: Handle, status: Out<'_, u32>, number: Out<'_, u64>) {
        call.life()?.capture_info(stream, status, number)
    }

    /// As `cuStreamGetCaptureInfo`, with the graph and the nodes that the next work comes after.
    11030 cuStreamGetCaptureInfo_v2(
        call, stream: Handle, status: Out<'_, u32>, number: Out<'_, u64>,
        graph: Out<'_, Handle>, dependencies: Out<'_, Handle>, count: Out<'_, usize>,
    ) {
        let life = call.life()?;
        life.capture_info(stream, status, number)?;
        life.inside(stream, graph, dependencies, count);
        Ok(())
    }

    /// As `cuStreamGetCaptureInfo_v2`. No edge has data.
    12030 cuStreamGetCaptureInfo_v3(
        call, stream: Handle, status: Out<'_, u32>, number: Out<'_, u64>,
        graph: Out<'_, Handle>, dependencies: Out<'_, Handle>, edges: Out<'_, Handle>, count: Out<'_, usize>,
    ) {
        let life = call.life()?;
        life.capture_info(stream, status, number)?;
        life.inside(stream, graph, dependencies, count);
        offer(edges, 0);
        Ok(())
    }

    /// Changes the calling thread's mode, and gives back the one it had.
    10010 cuThreadExchangeStreamCaptureMode(call, mode: InOut<'_, u32>) {
        call.process()?;
        let mode = needed(mode)?;
        *mode = own::exchange_mode(Mode::parse(*mode)?) as u32;
        Ok(())
    }
}
