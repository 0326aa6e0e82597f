//! The CUDA device's [`Device`] implementation: each call checks its arguments, enters the context, and hands over to
//! the module that does the work.

use super::*;

/// The error of an operation that no captured stream takes.
fn captured(operation: &'static str) -> Error {
    Error::new(Kind::InvalidState, operation)
        .at("the stream is being captured")
        .hint("enqueue it outside of captures: no graph can repeat it")
}

impl Device for CudaDevice {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        let inner = &*self.inner;
        let taken = inner.told(Allocation::new(&inner.context, &inner.worker, bytes))?;
        let slice = inner.id.slice(taken.address, bytes);
        inner.memory.lock().allocations.push(taken);
        Ok(slice)
    }

    fn host_memory(&self, bytes: u64, node: Option<u32>) -> Result<Option<Arc<Map>>> {
        let inner = &*self.inner;
        if inner.host_memory == HostMemory::Registered {
            return Ok(None);
        }
        let map = inner.told(hosted::make(&inner.context, &inner.worker, bytes, node, inner.chunk))?;
        let map = Arc::new(map);
        inner.memory.lock().hosted.push(Arc::clone(&map));
        Ok(Some(map))
    }

    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        let inner = &*self.inner;
        let own = inner.memory.lock().hosted.iter().any(|hosted| Arc::ptr_eq(hosted, map));
        let stretch = match own {
            true => Stretch::of(map, inner.chunk),
            false if map.is_given() => {
                return Err(Error::new(Kind::InvalidConfig, "register host memory")
                    .at("memory that another device made, which this device cannot reach")
                    .hint("share the system's memory between devices, and register it with each"));
            }
            false => {
                let taken = inner.told(Registration::new(&inner.context, map, inner.chunk))?;
                let stretch = taken.stretch;
                inner.memory.lock().registered.push(taken);
                stretch
            }
        };
        let mut stretches = inner.stretches.lock();
        *stretches = Arc::new(stretches.iter().copied().chain([stretch]).collect());
        drop(stretches);
        Ok(inner.id.slice(stretch.start, stretch.bytes))
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands; nothing is read or written here.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        self.inner.id.slice(address, bytes)
    }

    fn id(&self) -> DeviceId {
        self.inner.id
    }

    fn granularity(&self) -> u64 {
        self.inner.grain
    }

    fn takes_host_memory(&self) -> bool {
        false
    }

    fn pins_host_memory(&self) -> bool {
        true
    }

    fn backing(&self, bytes: u64) -> Result<Backing> {
        let inner = &*self.inner;
        let physical = inner.told(Physical::new(&inner.context, &inner.worker, bytes, inner.grain))?;
        Ok(inner.memory.lock().add(physical, Protection::ReadWrite))
    }

    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        let inner = &*self.inner;
        let mapped = inner.memory.lock().range(&inner.context, pieces, protection);
        inner.told(mapped)
    }

    fn remap(&self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        let remapped = self.inner.memory.lock().remap(part, pieces);
        // The addresses map something else or nothing now, and nothing that runs from here on could be right.
        if remapped.as_ref().is_err_and(|error| error.kind() == Kind::DeviceFailed) {
            self.inner.lose();
        }
        remapped
    }

    fn maps_offsets(&self) -> Result<bool> {
        let inner = &*self.inner;
        let maps = inner.memory.lock().maps_offsets(&inner.context, &inner.worker, inner.grain);
        inner.told(maps)
    }

    fn export(&self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        let exported = self.inner.memory.lock().export(backing, protection);
        self.inner.told(exported)
    }

    fn import_backing(&self, descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing> {
        let inner = &*self.inner;
        let imported = inner.memory.lock().import(&inner.context, &descriptor, bytes, protection);
        inner.told(imported)
    }

    fn give_back(&self, backing: Backing) -> Result<()> {
        self.inner.memory.lock().give_back(backing)
    }

    fn stream(&self) -> Result<Stream> {
        let inner = &*self.inner;
        inner.keep(KnownStream::own(&inner.context))
    }

    fn event(&self) -> Result<Event> {
        let inner = &*self.inner;
        let own = OwnEvent::new(&inner.context).map_err(|refusal| inner.refused("new event", refusal))?;
        let mut events = inner.events.lock();
        events.push(own);
        Ok(Event(inner.handle(events.len() - 1)))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let event = self.inner.event(event)?;
        self.inner.enqueue("record", stream, |current, stream| current.event_record(event, stream))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let event = self.inner.event(event)?;
        self.inner.enqueue("wait", stream, |current, stream| current.stream_wait(stream, event, 0))
    }

    fn edge(&self, event: Event, from: Stream, to: Stream) -> Result<()> {
        let event = self.inner.event(event)?;
        let to = self.inner.known(to)?;
        self.inner.enqueue("edge", from, |current, from| {
            current.event_record(event, from)?;
            current.stream_wait(to, event, 0)
        })
    }

    fn query(&self, event: Event) -> Result<bool> {
        let event = self.inner.event(event)?;
        let answer = self.inner.context.relaxed().and_then(|current| current.event_query(event));
        self.inner.synchronized(answer)
    }

    fn synchronize(&self, event: Event) -> Result<()> {
        let event = self.inner.event(event)?;
        let answer = self.inner.context.relaxed().and_then(|current| current.event_synchronize(event));
        self.inner.synchronized(answer).map(|_| ())
    }

    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        let inner = &*self.inner;
        inner.id.check(&from)?;
        inner.id.check_target(&to)?;
        if from.bytes() != to.bytes() {
            return Err(bad("copy of another length", to.bytes()));
        }
        let (source, target) = (from.address(), to.address());
        let whole =
            |at: u64, bytes: u64| [source + at, target + at, bytes].iter().all(|n| n.is_multiple_of(4));
        let stretches = inner.stretches();
        let each = |visit: &mut dyn FnMut(u64, u64, bool) -> Result<()>| {
            pieces(&stretches, source, target, from.bytes(), visit)
        };
        // Check all pieces before enqueueing any.
        each(&mut |at, bytes, host| match host && !whole(at, bytes) {
            true => Err(bad("copy of host memory that is not in words of 4 bytes", bytes)),
            false => Ok(()),
        })?;
        each(&mut |at, bytes, host| {
            inner.enqueue("copy", stream, |current, stream| match host {
                true => {
                    let args = abi::CopyArgs { from: source + at, to: target + at, bytes };
                    inner.launches.copy(&Enqueueing { current, module: &inner.module, stream }, &args)
                }
                false => current.copy(target + at, source + at, bytes, stream),
            })
        })
    }

    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()> {
        let inner = &*self.inner;
        checks::prefetch(inner.id, &slice, rate)?;
        let raw = inner.known(stream)?;
        let (from, to) = (slice.address(), slice.address().saturating_add(slice.bytes()));
        let stretches = inner.stretches();
        // L2 keeps no host memory.
        if stretches.iter().any(|it| from < it.start.saturating_add(it.bytes) && it.start < to) {
            return Ok(());
        }
        inner.enqueue_known("prefetch", raw, |current, stream| {
            let e = Enqueueing { current, module: &inner.module, stream };
            inner.launches.prefetch(&e, from, slice.bytes(), rate)
        })
    }

    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        let inner = &*self.inner;
        let raw = inner.known(stream)?;
        if inner.health.failed().is_some() {
            return Ok(());
        }
        let Some(id) = inner.capture_of("call", raw)? else {
            return inner.host_function("call", raw, inner.calls.once(work)).map(|_| ());
        };
        let checked = inner.graphs.lock().check_capture(id);
        checked?;
        let enqueued = inner.calls.captured(work);
        // A capture ends on the thread on which it began, which is this one, so it is still in progress.
        if inner.host_function("call", raw, enqueued)? {
            inner.graphs.lock().hold(id, enqueued.number);
        }
        Ok(())
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        let inner = &*self.inner;
        let raw = inner.known(stream)?;
        if let Some(kind) = inner.health.failed() {
            completer.fail(kind);
            return Ok(());
        }
        if inner.capture_of("complete", raw)?.is_some() {
            return Err(Error::new(Kind::InvalidState, "complete")
                .at("the stream is being captured")
                .hint("a ticket ends once and a graph runs often: complete the ticket after the launch"));
        }
        inner.host_function("complete", raw, inner.calls.complete(completer)).map(|_| ())
    }

    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        let inner = &*self.inner;
        let pools = CudaPools::new(layout, inner.id, &inner.context, &inner.worker, inner.launches);
        let pools = inner.told(pools)?;
        let mut all = inner.pools.lock();
        all.push(Arc::new(pools));
        Ok(inner.id.pools(all.len() - 1))
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        let inner = &*self.inner;
        // Check before staging: a rejected call leaves the staged lists as they were.
        let raw = inner.known(stream)?;
        let pools = inner.pool(pools)?;
        pools.extents.check(&op)?;
        if matches!(op, PoolOp::Warm(_) | PoolOp::Newest(_) | PoolOp::Resize(_))
            && inner.health.failed().is_none()
            && inner.capture_of(op.name(), raw)?.is_some()
        {
            return Err(captured(op.name()));
        }
        pools.lists.stage(&op);
        inner.enqueue_known(op.name(), raw, |current, stream| {
            pools.run(&Enqueueing { current, module: &inner.module, stream }, &op)
        })
    }

    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()> {
        let inner = &*self.inner;
        let raw = inner.known(stream)?;
        let asker = Asker { name: NAME, device: inner.id, exact: true, top_k_max: u32::MAX };
        page_ops::check(&asker, &op)?;
        let copy = match op {
            PageOp::Begin(begin) => {
                let args = pages::begin_args(&page_ops::begin(&begin));
                return inner.enqueue_known(op.name(), raw, |current, stream| {
                    inner.launches.begin_pages(&Enqueueing { current, module: &inner.module, stream }, &args)
                });
            }
            PageOp::Copy(copy) => copy,
        };
        if inner.health.failed().is_none() && inner.capture_of(op.name(), raw)?.is_some() {
            return Err(captured(op.name()));
        }
        let stretches = inner.stretches();
        inner.enqueue_known(op.name(), raw, |current, stream| {
            let e = Enqueueing { current, module: &inner.module, stream };
            let (engine_bytes, batches) = (inner.copy_engine_bytes, &inner.batch_copies);
            Copies { e: &e, launches: &inner.launches, stretches: &stretches, engine_bytes, batches }
                .run(&copy)
        })
    }

    fn capture(&self, stream: Stream) -> Result<()> {
        self.inner.known(stream)?;
        self.inner.check()?;
        let begun = self.inner.graphs.lock().begin(&self.inner.context, stream);
        self.inner.told(begun)
    }

    fn captured(&self, stream: Stream) -> Result<Graph> {
        let inner = &*self.inner;
        inner.known(stream)?;
        inner.reap();
        let ended = inner.graphs.lock().end(&inner.context, stream);
        let made = inner.told(ended).and_then(|ended| {
            let made = Executable::new(&inner.context, &inner.worker, &ended);
            let made = made.map_err(|refusal| inner.refused("capture", refusal));
            // If the device failed meanwhile, the capture is incomplete.
            let made = made.and_then(|executable| inner.check().map(|()| executable));
            made.inspect_err(|_| ended.calls.iter().for_each(|slot| inner.calls.clear(*slot)))
        });
        let executable = made.map_err(|error| inner.check().err().unwrap_or(error))?;
        let number = inner.graphs.lock().add(executable);
        Ok(Graph(inner.handle(number as usize)))
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let raw = self.inner.known(stream)?;
        self.inner.capture_of("capture", raw).map(|capture| capture.is_some())
    }

    fn launch(&self, graph: Graph, stream: Stream) -> Result<()> {
        let inner = &*self.inner;
        let raw = inner.known(stream)?;
        let number = inner.index("graph", graph.0)?;
        let mut graphs = inner.graphs.lock();
        let at = graphs.find(number).ok_or_else(|| bad("graph", graph.0))?;
        if inner.health.failed().is_some() {
            return Ok(());
        }
        let launched = graphs.launch(&inner.context, at, raw);
        drop(graphs);
        inner.heard("launch", launched?).map(|_| ())
    }

    fn release(&self, graph: Graph) -> Result<()> {
        let inner = &*self.inner;
        let number = inner.index("graph", graph.0)?;
        let mut graphs = inner.graphs.lock();
        let at = graphs.find(number).ok_or_else(|| bad("graph", graph.0))?;
        let released = graphs.release(&inner.context, at);
        drop(graphs);
        inner.noted("release", released);
        inner.reap();
        Ok(())
    }

    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64> {
        let pools = self.inner.pool(pools)?;
        pools.extents.lane(lane)?;
        let sum = pools.digest_now(&self.inner.worker, &self.inner.module, lane);
        sum.map_err(|refusal| self.inner.refused("digest", refusal))
    }

    fn validate(&self, pools: Pools) -> Result<()> {
        self.inner.told(self.inner.pool(pools)?.validate(&self.inner.worker))
    }
}
