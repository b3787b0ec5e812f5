# The service as an image. Data of the embedded Postgres live in /data; with INDEXER_DATABASE_URL nothing does.
# It listens on all addresses, so it needs INDEXER_API_KEYS or, where only friends reach it, INDEXER_INSECURE=true.
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md ./
COPY indexer ./indexer
COPY migrations ./migrations
RUN pip install --no-cache-dir . \
    && useradd --system --create-home --home-dir /home/indexer indexer \
    && install --directory --owner indexer --group indexer /data

WORKDIR /data
USER indexer
RUN kv-indexer compile
ENV INDEXER_HOST=0.0.0.0 \
    INDEXER_DATA_DIR=/data \
    PYTHONUNBUFFERED=1
EXPOSE 8090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; tls = os.environ.get('INDEXER_TLS_CERT_FILE'); \
         r.urlopen(('https' if tls else 'http') + '://127.0.0.1:8090/healthz', timeout=2, \
         context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["kv-indexer"]
CMD ["serve"]
